"""The CUDA backend: numba.cuda kernels for one NVIDIA GPU. `model.py` is the page to read first."""

from ..backend import LOOKS
from ..reference import top_logprobs
from .device import check_device
from .kv_cache import copy_positions, kv_cache_bytes, new_kv_cache, read_positions, write_positions
from .layers.adapters import with_adapters
from .model import final_norm, forward, multi_step, stop_early
from .params import DTYPES as ROWS
from .params import load_params, share_of
from .ranks import share_embedding
from .sampling import filter_logits, logits_of, process_logits, sample
from .workspace import check_memory, check_model, gpu_room, new_workspace, stream_of

DTYPES = tuple(ROWS)
MAX_STEP_TOKENS = 2048
PACKED = None  # weights are packed at load; no file keeps them
QUEUES_STEPS = True
SEEN = CHANGED = LOOKS
ADAPTED = tuple(name for name, dtype in ROWS.items() if not dtype.has_scales)


def kv_cache_dtypes(dtype: str) -> tuple[str, ...]:
    numbers = ROWS[dtype].numbers
    return (numbers.name, "int8") if numbers.has_mma else (numbers.name,)
