"""The model's weights, as they are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygpt.kernels.backend import KINDS, NORMS, linear_names


@dataclass(frozen=True)
class Params:
    """The checkpoint's tensors and config. watch(name, x) sees the input of each linear layer, x (N, in)."""

    config: Any
    tensors: dict[str, np.ndarray]
    watch: Callable[[str, np.ndarray], None] | None = None

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[name]


def load_params(checkpoint, dtype: str = "float32", threads: int = 1) -> Params:
    config = checkpoint.config
    names = ["wte.weight", "lm_head.weight"]
    names += ["wpe.weight"] * (not config.has_alibi)
    names += ["project_in.weight", "project_out.weight"] * (config.embed_dim is not None)
    parts = ["ln_e"] * config.embed_norm + ["ln_f"] * config.final_norm
    for i in range(config.n_layer):
        parts += [*(f"h.{i}.{norm}" for norm in NORMS), *linear_names(config, i)]
        names += [f"h.{i}.mlp.gate.weight"] * (i in config.expert_layers)
    names += [f"{part}.{kind}" for part in parts for kind in KINDS]
    return Params(config, {name: checkpoint.tensor(name) for name in names})
