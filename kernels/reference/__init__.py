"""The NumPy backend: the readable specification of every kernel, and the oracle of the others.

Imports NumPy and nothing of another backend. `model.py` is the page to read first.
"""

from tinygpt.kernels.any_machine import QUEUES_STEPS, check_device, check_memory, check_model
from tinygpt.kernels.reference.kv_cache import (
    copy_positions,
    kv_cache_bytes,
    new_kv_cache,
    read_positions,
    write_positions,
)
from tinygpt.kernels.reference.model import forward
from tinygpt.kernels.reference.params import load_params
from tinygpt.kernels.reference.processors import process_logits
from tinygpt.kernels.reference.sampling import sample, top_logprobs
from tinygpt.kernels.reference.trace import trace
from tinygpt.kernels.reference.warpers import filter_logits
from tinygpt.kernels.reference.workspace import new_workspace

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

DTYPES = ("float32",)
MAX_STEP_TOKENS = 512
PACKED = None  # there is no layout of its own to convert a checkpoint to
multi_step = None  # a step after another is easier to read


def kv_cache_dtypes(dtype: str) -> tuple[str, ...]:
    """The dtypes of a KV cache beside weights of `dtype`, the usual one first."""
    return ("float32", "int8")


def stop_early(workspace, is_wanted: bool) -> None:
    """Nothing: a call is one step."""
