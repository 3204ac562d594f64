"""The CPU backend: Numba kernels over packed weights.

`model.py` is the page; beside it stand the parameters, the KV cache and the workspace that it works on, and in folders
below it the kernels that it calls. Imports nothing of another backend, but for the reference's layer norm on the host.
"""

from tinygpt.kernels.any_machine import QUEUES_STEPS, check_device, check_memory, check_model
from tinygpt.kernels.cpu import packed as PACKED
from tinygpt.kernels.cpu.kv_cache import (
    copy_positions,
    kv_cache_bytes,
    new_kv_cache,
    read_positions,
    write_positions,
)
from tinygpt.kernels.cpu.model import forward
from tinygpt.kernels.cpu.multi_step import multi_step, stop_early
from tinygpt.kernels.cpu.packing.weights import DTYPES
from tinygpt.kernels.cpu.params import load_params
from tinygpt.kernels.cpu.sampling.processors import process_logits
from tinygpt.kernels.cpu.sampling.sampling import filter_logits, sample, top_logprobs
from tinygpt.kernels.cpu.trace import trace
from tinygpt.kernels.cpu.workspace import new_workspace

__all__ = [
    "DTYPES",
    "MAX_STEP_TOKENS",
    "PACKED",
    "QUEUES_STEPS",
    "check_device",
    "check_memory",
    "check_model",
    "copy_positions",
    "filter_logits",
    "forward",
    "kv_cache_bytes",
    "kv_cache_dtypes",
    "load_params",
    "multi_step",
    "new_kv_cache",
    "new_workspace",
    "process_logits",
    "read_positions",
    "sample",
    "stop_early",
    "top_logprobs",
    "trace",
    "write_positions",
]

# Enough for the matrix products to run at full speed, few enough that a decoding sequence never waits long for
# another's prompt.
MAX_STEP_TOKENS = 512


def kv_cache_dtypes(dtype: str) -> tuple[str, ...]:
    """The dtypes of a KV cache beside weights of `dtype`, the usual one first."""
    return ("float32", "bfloat16", "int8") if dtype == "float32" else ("bfloat16", "float32", "int8")
