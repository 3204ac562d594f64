"""The CPU backend: Numba kernels over packed weights. `model.py` is the page to read first."""

from tinygpt.kernels.backend import LOOKS, accept
from tinygpt.kernels.cpu import packed as PACKED
from tinygpt.kernels.cpu.kv_cache import copy_positions, kv_cache_bytes, new_kv_cache, read_positions, write_positions
from tinygpt.kernels.cpu.layers.low_rank import with_adapters
from tinygpt.kernels.cpu.model import forward
from tinygpt.kernels.cpu.packing.weights import DTYPES
from tinygpt.kernels.cpu.params import load_params
from tinygpt.kernels.cpu.sampling import filter_logits, process_logits, sample, top_logprobs
from tinygpt.kernels.cpu.steps import final_norm, multi_step, stop_early
from tinygpt.kernels.cpu.workspace import new_workspace

MAX_STEP_TOKENS = 512
QUEUES_STEPS = False
SEEN = CHANGED = LOOKS
check_device = check_model = check_memory = accept


def kv_cache_dtypes(dtype: str) -> tuple[str, ...]:
    return ("float32", "bfloat16", "int8") if dtype == "float32" else ("bfloat16", "float32", "int8")
