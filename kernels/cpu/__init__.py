"""The CPU backend: Numba kernels over packed weights. Same names as every backend's."""

from tinygpt.kernels.cpu.kv_cache import copy_positions, read_positions, write_positions
from tinygpt.kernels.cpu.model import forward, trace
from tinygpt.kernels.cpu.params import kv_cache_bytes, load_params, new_kv_cache, new_workspace
from tinygpt.kernels.cpu.sampling.processors import process_logits
from tinygpt.kernels.cpu.sampling.sampling import sample, top_logprobs
from tinygpt.kernels.cpu.sampling.warpers import filter_logits

__all__ = [
    "copy_positions",
    "filter_logits",
    "forward",
    "kv_cache_bytes",
    "load_params",
    "new_kv_cache",
    "new_workspace",
    "process_logits",
    "read_positions",
    "sample",
    "top_logprobs",
    "trace",
    "write_positions",
]
