"""Kernels compiled before a request has to wait for them: `tinygpt.warmup`."""

from tinygpt.errors import TinyGPTError
from tinygpt.execution.backend import load_backend
from tinygpt.execution.kernels_name import kernels_name
from tinygpt.kernels.compiling import ANNOUNCER
from tinygpt.llm import LLM
from tinygpt.sampling_params import SamplingParams

# What a request may ask for, each on its way through other kernels.
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
    """Compile all kernels that a model of this dtype may need on the CPU; how many were left to compile.

    Kernels are kept for later processes. Models of one dtype share them, whatever their size. Takes seconds the first
    time, and a moment ever after. The arguments are those of LLM.
    Raises TinyGPTError if the kernels cannot be kept, and what LLM raises.
    """
    from tinygpt.kernels.cpu.jit import kernel_files, mark_warm

    load_backend("cpu", dtype)  # an impossible one is refused before the weights are read
    counter = _Counter()
    with (
        ANNOUNCER.told(counter),
        LLM(model, dtype, threads=threads, max_num_seqs=1, kv_cache_dtype=kv_cache_dtype) as llm,
    ):
        for params in REQUESTS:
            llm.generate([[0, 0]], params)
        mark_warm(kernels_of(llm, kv_cache_dtype))
    if not kernel_files().is_keeping:
        raise TinyGPTError("the compiled kernels could not be kept, so other processes compile them again.")
    return counter.num_kernels


def kernels_of(llm: LLM, kv_cache_dtype: str) -> str:
    """A name for the kernels that a model runs."""
    return kernels_name(llm.config, llm.dtype, kv_cache_dtype, llm.engine.runner.shares_layers)


class _Counter:
    def __init__(self):
        self.num_kernels = 0

    def begin(self, name: str) -> None:
        self.num_kernels += 1

    def end(self) -> None:
        pass
