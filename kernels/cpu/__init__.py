"""The CPU backend: Numba kernels over packed weights. Same names as every backend's."""

from tinygpt.kernels.cpu.load import cache_bytes, load_params, new_cache, new_workspace
from tinygpt.kernels.cpu.model import forward
from tinygpt.kernels.cpu.sampling import filter_logits, sample, top_logprobs

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
