"""The NumPy backend: the readable specification of every kernel, and the oracle of the others."""

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
    "filter_logits",
    "forward",
    "load_params",
    "new_cache",
    "new_workspace",
    "sample",
    "top_logprobs",
]
