"""The CUDA backend: numba.cuda kernels for one NVIDIA card. Same names as every backend's, and `run_ahead`."""

from tinygpt.kernels.cuda.kv_cache import copy_positions, read_positions, write_positions
from tinygpt.kernels.cuda.model import forward, trace
from tinygpt.kernels.cuda.params import kv_cache_bytes, load_params, new_kv_cache
from tinygpt.kernels.cuda.sampling.sampling import filter_logits, process_logits, run_ahead, sample, top_logprobs
from tinygpt.kernels.cuda.workspace import new_workspace

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
    "run_ahead",
    "sample",
    "top_logprobs",
    "trace",
    "write_positions",
]
