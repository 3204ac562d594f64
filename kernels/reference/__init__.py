"""The NumPy backend: the readable specification and oracle of the others. Read `model.py` first."""

from ..backend import LOOKS, SCORES, no_op
from .layers import final_norm
from .model import forward
from .sampling import filter_logits, process_logits, sample, top_logprobs
from .state import (
    copy_positions,
    kv_cache_bytes,
    load_params,
    new_kv_cache,
    read_positions,
    with_adapters,
    write_positions,
)

DTYPES = ADAPTED = ("float32",)
MAX_STEP_TOKENS = 512
PACKED = None
QUEUES_STEPS = False
SEEN = CHANGED = (*LOOKS, *SCORES)
multi_step = None  # single steps are easier to read
check_device = check_model = check_memory = no_op


def kv_cache_dtypes(dtype: str) -> tuple[str, ...]:
    return ("float32", "int8")


def stop_early(workspace, is_wanted: bool) -> None:
    """Do nothing: a call is one step."""


def new_workspace(
    config, max_num_tokens: int, max_num_logits: int, threads: int = 1, dtype: str = "float32"
) -> None:
    """Allocate nothing: the page makes its arrays as it goes."""
