"""The flags that choose a model and how it runs, and the loading: shared by every command that needs a model."""

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

from tinygpt.cli.flags import reader, whole_number
from tinygpt.cli.messages import elapsed, say
from tinygpt.config import DTYPES
from tinygpt.hardware.threads import thread_count
from tinygpt.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tinygpt.llm import LLM

# Each library reads its variable once, when it is imported.
THREAD_POOLS = (
    "NUMBA_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
# Arguments of LLM that are flags of the same names.
LLM_FLAGS = (
    "model",
    "dtype",
    "device",
    "threads",
    "max_num_seqs",
    "max_model_len",
    "kv_cache_dtype",
    "max_num_batched_tokens",
    "prefix_cache_seqs",
    "draft_model",
    "num_speculative_tokens",
    "lora",
)
COLLECT_AFTER = 200_000  # new objects


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = add_model_arguments(parser)
    group.add_argument(
        "--device",
        default="cpu",
        help='"cpu"; "cuda": an NVIDIA card; "reference": NumPy in float64, slow (default: %(default)s)',
    )
    group.add_argument(
        "--max-num-seqs",
        type=whole_number,
        default=32,
        metavar="N",
        help="samples that run at once; more wait their turn (default: %(default)s)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=whole_number,
        metavar="N",
        help="new tokens in a step, prompts' included (default: 512, or --max-num-seqs if that is more)",
    )
    group.add_argument(
        "--prefix-cache-seqs",
        type=whole_number,
        default=4,
        metavar="N",
        help="ended samples that stay in memory for prompts that begin like them (default: %(default)s)",
    )
    group.add_argument(
        "--max-model-len",
        type=whole_number,
        metavar="N",
        help="positions kept for each sample, prompt included (default: all that the model has)",
    )
    group.add_argument("--lora", metavar="PATH", help="a LoRA adapter in PEFT's layout to merge (default: none)")
    group.add_argument(
        "--soft-prompt",
        action="append",
        type=reader(_named_path, "NAME=PATH"),
        metavar="NAME=PATH",
        help="a soft prompt in PEFT's layout, to stand in front of every prompt; with --input several can be given, "
        "for lines that have a field soft_prompt, and the first is for those that have none (default: none)",
    )
    group.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="a smaller model with the same tokens that guesses ahead: fewer steps, the same text (default: none)",
    )
    group.add_argument(
        "--num-speculative-tokens",
        type=whole_number,
        default=4,
        metavar="N",
        help="how many it guesses (default: %(default)s)",
    )


def _named_path(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ValueError
    return name, path


def add_model_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The flags of every command that loads a model into the CPU's kernels; the group that holds them."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", default="demo", help='"demo" (embedded), a local folder or a Hub id (default: %(default)s)'
    )
    group.add_argument(
        "--dtype",
        default="auto",
        help=f"precision of the weights: {', '.join(DTYPES)}; auto is a converted checkpoint's own, and float32 for "
        "any other (default: %(default)s)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        metavar="DTYPE",
        help="precision of the KV cache: float32 or bfloat16; auto is float32 for float32 weights, and bfloat16 for "
        "the others (default: %(default)s)",
    )
    group.add_argument(
        "--threads", type=whole_number, metavar="N", help="threads that compute (default: one for each physical core)"
    )
    return group


def load_llm(args: argparse.Namespace, check: Callable[["LLM"], None]) -> "LLM":
    """Load the model that the flags choose, its kernels compiled.

    `check` is called with the loaded model to raise what is impossible about the request, before the kernels of
    a step compile: the first run with a dtype does that, and it takes seconds.
    """
    set_thread_pools(args.threads)
    # Numba and a tokenizer make a million objects to keep; looking for garbage among them took 0.1 s of a start.
    gc.set_threshold(COLLECT_AFTER)
    from tinygpt.llm import LLM

    with _notice_of_compiling(args.dtype) if args.device == "cpu" else nullcontext():
        soft_prompts = dict(args.soft_prompt or ())
        llm = LLM(**{name: getattr(args, name) for name in LLM_FLAGS}, soft_prompts=soft_prompts)
        check(llm)
        if args.device == "cpu":
            _compile_kernels(llm, args.kv_cache_dtype)
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


def kernels_of(llm: "LLM", kv_cache_dtype: str) -> str:
    """A name for the kernels that a model runs: they are compiled for its weights' dtype and its KV cache's."""
    return llm.dtype if kv_cache_dtype == "auto" else f"{llm.dtype}-{kv_cache_dtype}"


@contextmanager
def _notice_of_compiling(dtype: str) -> Iterator[None]:
    """From the first kernel that compiles in the block until its end, say so."""
    kernels = "kernels" if dtype == "auto" else f"{dtype} kernels"
    message = f"compiling {kernels} for this machine, once (10 to 20 s)"
    with ExitStack() as shown, at_first_compilation(lambda: shown.enter_context(elapsed(message))):
        yield


@contextmanager
def at_first_compilation(show: Callable[[], object]) -> Iterator[None]:
    """Call `show` when the first kernel compiles in the block. Says, before it, if compiled kernels cannot be kept."""
    from tinygpt.kernels.cpu.jit import cache_folder, on_compilation

    if cache_folder().note:
        say(cache_folder().note)
    waiting = [show]

    def show_once() -> None:
        while waiting:
            waiting.pop()()

    with on_compilation(show_once):
        yield


def _compile_kernels(llm: "LLM", kv_cache_dtype: str) -> None:
    """Take a step if this machine has not taken one with these kernels yet."""
    from tinygpt.kernels.cpu.jit import cache_is_cold, mark_warm

    kernels = kernels_of(llm, kv_cache_dtype)
    if cache_is_cold(kernels):
        llm.generate([[0]], SamplingParams(max_tokens=1))
        mark_warm(kernels)
