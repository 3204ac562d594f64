"""The CUDA backend: numba.cuda kernels for one NVIDIA GPU.

`model.py` is the page; beside it stand the parameters, the KV cache and the workspace that it works on, and
`launches.py`, which picks the kernels of `layers/` and their grids. Imports nothing of another backend but the
reference's, which does what is asked of this one on the host.
"""

from tinygpt.kernels.cuda.kv_cache import (
    copy_positions,
    kv_cache_bytes,
    new_kv_cache,
    read_positions,
    write_positions,
)
from tinygpt.kernels.cuda.model import forward
from tinygpt.kernels.cuda.params import check_model, load_params
from tinygpt.kernels.cuda.runtime.device import check_device
from tinygpt.kernels.cuda.sampling.sampling import filter_logits, process_logits, sample
from tinygpt.kernels.cuda.steps import multi_step, stop_early, trace
from tinygpt.kernels.cuda.workspace import check_memory, new_workspace
from tinygpt.kernels.reference import top_logprobs

DTYPES = ("float32", "bfloat16", "int8")
MAX_STEP_TOKENS = 2048
PACKED = None  # weights are packed at load; no file keeps them
QUEUES_STEPS = True  # the tokens of the first are there before the last has been taken


def kv_cache_dtypes(dtype: str) -> tuple[str, ...]:
    """The dtypes of a KV cache beside weights of `dtype`, the usual one first."""
    return ("float32",) if dtype == "float32" else ("bfloat16",)
