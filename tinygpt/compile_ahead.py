"""`tinygpt.warmup`: compile kernels before a request waits for them."""

import subprocess
import sys

import numpy as np

from tinygpt.engine.model_source import load_backend
from tinygpt.engine.sampling_state import Warpers
from tinygpt.errors import TinyGPTError
from tinygpt.llm import LLM
from tinygpt.sampling_params import SamplingParams

# Requests that take the model and the sampler through all kernels.
REQUESTS = (
    SamplingParams(max_tokens=2, ignore_eos=True),
    SamplingParams(max_tokens=2, temperature=0.8, top_k=40, top_p=0.95, seed=0, ignore_eos=True),
    SamplingParams(max_tokens=2, temperature=0.8, typical_p=0.9, seed=0, ignore_eos=True),
    SamplingParams(max_tokens=2, logprobs=3, ignore_eos=True),
    SamplingParams(
        max_tokens=2, repetition_penalty=1.1, temperature=1.0, logprobs=1, logprobs_mode="processed", ignore_eos=True
    ),
)


def warmup(model: str = "demo", dtype: str = "auto", kv_cache_dtype: str = "auto", threads: int | None = None) -> int:
    """Compile all kernels that a model of this dtype may need on the CPU. Return the number that had to compile.

    Kernels are kept for later processes. Models of one dtype share them, whatever their size. The arguments are those
    of LLM. Raises TinyGPTError if the kernels cannot be kept, and the errors of LLM.
    """
    from tinygpt.kernels.cpu.jit import kernel_cache

    load_backend("cpu", dtype)  # refuse an impossible dtype before reading the weights
    before = kernel_cache().num_compiled
    with LLM(model, dtype, threads=threads, max_num_seqs=1, kv_cache_dtype=kv_cache_dtype) as llm:
        for params in REQUESTS:
            llm.generate([[0, 0]], params)
    if not kernel_cache().is_keeping:
        raise TinyGPTError("the compiled kernels could not be kept, so other processes compile them again.")
    return kernel_cache().num_compiled - before


def start_compiling_draw() -> None:
    """Compile the draw of tokens in a second process, on a first run: a quarter of its work.

    Numba compiles one kernel at a time in a process. If the process is late, this one compiles the draw itself.
    """
    from tinygpt.kernels.cpu.jit import kernel_cache

    if kernel_cache().folder is None or kernel_cache().names():
        return
    code = f"import sys; sys.path[:] = {sys.path!r}; from tinygpt.compile_ahead import compile_draw; compile_draw()"
    nowhere = subprocess.DEVNULL
    subprocess.Popen([sys.executable, "-c", code], stdin=nowhere, stdout=nowhere, stderr=nowhere)


def compile_draw() -> None:
    warpers = Warpers(*np.array([[1.0], [0], [1], [0], [0], [1], [0], [0]]))
    load_backend("cpu", "auto").sample(np.zeros((1, 2), np.float32), warpers, *np.zeros((3, 1), np.uint64))
