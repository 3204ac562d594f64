"""The model's weights, read in place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygpt.kernels.backend import KINDS, NORMS, linear_names


@dataclass(frozen=True)
class Params:
    """The checkpoint's tensors under their own names, and its config.

    watch(name, x), where it is given, sees what goes into each linear layer, x (N, in).
    """

    config: Any
    tensors: dict[str, np.ndarray]
    watch: Callable[[str, np.ndarray], None] | None = None

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[name]


def load_params(checkpoint, dtype: str = "float32", threads: int = 1) -> Params:
    """Take the tensors as they are."""
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
