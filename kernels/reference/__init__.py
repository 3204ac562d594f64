"""The NumPy backend: the readable specification of every kernel, and the oracle of the others."""

from tinygpt.kernels.reference.cache import copy_positions, read_positions, write_positions
from tinygpt.kernels.reference.model import (
    cache_bytes,
    forward,
    load_params,
    new_cache,
    new_workspace,
)
from tinygpt.kernels.reference.sampling import filter_logits, sample, top_logprobs

__all__ = [
    "cache_bytes",
    "copy_positions",
    "filter_logits",
    "forward",
    "load_params",
    "new_cache",
    "new_workspace",
    "read_positions",
    "sample",
    "top_logprobs",
    "write_positions",
]
