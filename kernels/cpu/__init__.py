"""The CPU backend: Numba kernels over packed weights. Same names as every backend's."""

from tinygpt.kernels.cpu.cache import copy_positions, read_positions, write_positions
from tinygpt.kernels.cpu.load import cache_bytes, load_params, new_cache, new_workspace
from tinygpt.kernels.cpu.model import forward
from tinygpt.kernels.cpu.sampling import filter_logits, sample, top_logprobs

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
