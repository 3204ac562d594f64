"""The CUDA backend: numba.cuda kernels for one NVIDIA GPU.

Imports nothing of another backend but the reference's, which does what is asked of this one on the host.
"""

from tinygpt.kernels.cuda.kv_cache import copy_positions, read_positions, write_positions
from tinygpt.kernels.cuda.memory import bytes_needed
from tinygpt.kernels.cuda.model import forward, trace
from tinygpt.kernels.cuda.params import kv_cache_bytes, load_params, new_kv_cache
from tinygpt.kernels.cuda.runtime import device
from tinygpt.kernels.cuda.sampling.sampling import filter_logits, multi_step, process_logits, sample, top_logprobs
from tinygpt.kernels.cuda.workspace import new_workspace
from tinygpt.kernels.errors import DeviceError

__all__ = [
    "DTYPES",
    "MAX_STEP_TOKENS",
    "PACKED",
    "check_device",
    "check_memory",
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
    "top_logprobs",
    "trace",
    "write_positions",
]

DTYPES = ("float32", "bfloat16", "int8")
MAX_STEP_TOKENS = 2048
PACKED = None  # weights are packed at load; no file keeps them


def kv_cache_dtypes(dtype: str) -> tuple[str, ...]:
    """The dtypes of a KV cache beside weights of `dtype`, the usual one first."""
    return ("float32",) if dtype == "float32" else ("bfloat16",)


def check_device() -> None:
    """DeviceError unless there is a GPU that the kernels run on, and all that they need."""
    device.card()


def check_memory(config, tied, dtype, kv_cache_dtype, num_slots, max_model_len, max_num_tokens, max_num_logits) -> None:
    """DeviceError, before anything is loaded, if the model takes more memory than the GPU has free."""
    steps = max_num_tokens, max_num_logits
    needed = bytes_needed(config, dtype, tied, kv_cache_dtype, num_slots, max_model_len, *steps)
    free, total = device.card().free_bytes(), sum(needed.values())
    if total > free:
        parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in needed.items())
        raise DeviceError(
            f"this takes {total / 2**30:.2f} GiB of the card's memory ({parts}) and {free / 2**30:.2f} GiB are "
            "free: lower max_num_seqs, prefix_cache_seqs, max_model_len or max_num_batched_tokens, or take a smaller "
            "dtype."
        )
