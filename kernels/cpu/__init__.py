"""The CPU backend: Numba kernels over packed weights. `model.py` is the page to read first."""

from ..backend import LOOKS, no_op
from . import packed as PACKED
from .kv_cache import copy_positions, kv_cache_bytes, new_kv_cache, read_positions, write_positions
from .layers.adapters import with_adapters
from .model import forward
from .multi_step import final_norm, multi_step, stop_early
from .packing.weights import DTYPES
from .params import load_params
from .sampling import filter_logits, process_logits, sample, top_logprobs
from .workspace import new_workspace

MAX_STEP_TOKENS = 512
QUEUES_STEPS = False
SEEN = CHANGED = LOOKS
check_device = check_model = check_memory = no_op


def kv_cache_dtypes(dtype: str) -> tuple[str, ...]:
    return ("float32", "bfloat16", "int8") if dtype == "float32" else ("bfloat16", "float32", "int8")
