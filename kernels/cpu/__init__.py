"""The CPU backend: Numba kernels over packed weights. `model.py` is the page to read first."""

from ..backend import LOOKS, no_op
from . import arrays as PACKED
from . import dtypes
from .arrays import share_of
from .kv_cache import KINDS, copy_positions, kv_cache_bytes, new_kv_cache, read_positions, write_positions
from .layers.linear import with_adapters
from .layers.operands import new_float32_operand
from .load import load_params
from .model import final_norm, forward, multi_step, stop_early
from .native import check_device
from .sampling import filter_logits, process_logits, sample, top_logprobs
from .workspace import logits_of, new_workspace, share_embedding, stream_of

DTYPES = tuple(dtypes.DTYPES)
ADAPTED = tuple(name for name, row in dtypes.DTYPES.items() if row.new_operand is new_float32_operand)
MAX_STEP_TOKENS = 512
QUEUES_STEPS = False
SEEN = CHANGED = LOOKS
check_model = check_memory = gpu_room = no_op


def kv_cache_dtypes(dtype: str) -> tuple[str, ...]:
    default = dtypes.DTYPES[dtype].kv_cache
    return default, *(other for other in KINDS if other != default)
