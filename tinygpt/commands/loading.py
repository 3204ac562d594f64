"""The flags that choose a model and how it runs, and the loading: shared by every command that needs a model."""

import argparse
import gc
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from tinygpt.commands.messages import elapsed, say
from tinygpt.sampling_params import SamplingParams
from tinygpt.threads import thread_count

if TYPE_CHECKING:
    from tinygpt.engine import LLM

# Each library reads its variable once, when it is imported.
THREAD_POOLS = (
    "NUMBA_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
COLLECT_AFTER = 200_000  # new objects


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = add_model_arguments(parser)
    group.add_argument(
        "--device", default="cpu", help='"cpu", or "reference": NumPy in float64, slow (default: %(default)s)'
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        default=32,
        metavar="N",
        help="samples that run at once; more wait their turn (default: %(default)s)",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="positions kept for each sample, prompt included (default: all that the model has)",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The flags of every command that loads a model into the CPU's kernels; the group that holds them."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", default="demo", help='"demo" (embedded), a local folder or a Hub id (default: %(default)s)'
    )
    group.add_argument(
        "--dtype",
        default="auto",
        help='precision of the weights: "float32", "bfloat16", "int8" or "int4"; "auto" is a converted checkpoint\'s '
        "own, and float32 for any other (default: %(default)s)",
    )
    group.add_argument(
        "--threads", type=int, metavar="N", help="threads that compute (default: one for each physical core)"
    )
    return group


def load_llm(args: argparse.Namespace, check: Callable[["LLM"], None]) -> "LLM":
    """Load the model that the flags choose, its kernels compiled.

    `check` is called before they compile, with the loaded model, to raise what is impossible about the
    request: the first run with a dtype compiles, and it takes seconds.
    """
    set_thread_pools(args.threads)
    # Numba and a tokenizer make a million objects to keep; looking for garbage among them took 0.1 s of a start.
    gc.set_threshold(COLLECT_AFTER)
    from tinygpt.engine import LLM

    llm = LLM(args.model, args.dtype, args.device, args.threads, args.max_num_seqs, args.max_model_len)
    check(llm)
    if args.device == "cpu":
        _compile_kernels(llm)
    return llm


def set_thread_pools(threads: int | None) -> None:
    """Size the thread pools of the libraries that are still to be imported. RequestError if impossible.

    --threads owns all of them. Without it, a variable that the user has set stays.
    """
    count = thread_count(threads)
    if "numba" in sys.modules:  # its pool has its size, and Numba refuses to be told another one
        return
    for name in THREAD_POOLS:
        if threads is not None or name not in os.environ:
            os.environ[name] = str(count)


def _compile_kernels(llm: "LLM") -> None:
    """Take a step, with a notice, if this machine has not compiled the kernels of the model's dtype yet."""
    from tinygpt.kernels.cpu.jit import cache_folder, cache_is_cold, mark_warm

    if cache_folder().note:
        say(cache_folder().note)
    if cache_is_cold(llm.dtype):
        with elapsed(f"compiling {llm.dtype} kernels for this machine, once (10 to 20 s)"):
            llm.generate([[0]], SamplingParams(max_tokens=1))
        mark_warm(llm.dtype)
