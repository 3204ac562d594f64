"""The model's weights, read in place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygpt.kernels.names import KINDS, LINEARS, NORMS


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
    names = ["wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias", "lm_head.weight"]
    for i in range(checkpoint.config.n_layer):
        names += [f"h.{i}.{part}.{kind}" for part in (*NORMS, *LINEARS.values()) for kind in KINDS]
    return Params(checkpoint.config, {name: checkpoint.tensor(name) for name in names})
