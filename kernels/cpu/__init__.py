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

from tinygpt.kernels.cpu import packed as PACKED

DTYPES = ("float32", "bfloat16", "int8", "int4")
MAX_STEP_TOKENS = 512
multi_step = None


def kv_cache_dtypes(dtype):
    return ("float32", "bfloat16") if dtype == "float32" else ("bfloat16", "float32")


def check_device():
    pass


def check_memory(*a):
    pass
