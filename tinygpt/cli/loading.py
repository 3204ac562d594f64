"""From a command line to a loaded model: thread pools are sized first, and a first run compiles in two processes."""

import argparse
import gc
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from tinygpt.cli.flags.model import llm_arguments
from tinygpt.cli.output.instructions import instructions
from tinygpt.cli.output.messages import counted, say
from tinygpt.hardware.cpu import cpu_name
from tinygpt.hardware.threads import MAX_THREADS, logical_cores, thread_count
from tinygpt.kernels import compiling
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
COLLECT_AFTER = 1_000_000  # new objects: to compile kernels leaves garbage
# OpenBLAS's threads look for work, for a twentieth of a second after NumPy is imported, on cores that others need: the
# power of two of the cycles for which they do, the lowest there is. Steps use kernels of our own.
QUIET_THREADS = ("OPENBLAS_THREAD_TIMEOUT", "4")
# For a second process, which finds its modules where this one does.
COMPILE_SHARE = "import sys; sys.path[:] = {!r}; from tinygpt.cli import loading; loading.compile_draw({!r})"
PATIENCE = 60  # seconds for which it may keep this one waiting

logger = logging.getLogger(__name__)


def load_llm(args: argparse.Namespace, check: Callable[["LLM"], None], **more: Any) -> "tuple[LLM, float]":
    """Load the model that the flags choose, its kernels compiled; and in how many seconds, compiling left out.

    more: arguments of LLM that are no model flags.

    `check` is called with the loaded model to raise what is impossible about the request, before the kernels of
    a step compile: the first run with a dtype does that, and it takes seconds.
    """
    started, clock = time.perf_counter(), compiling.CompileClock()
    set_thread_pools(args.threads)
    is_cpu = args.device == "cpu"
    with uncollected(), clock.watching(), _share_compiled_meanwhile(args) if is_cpu else nullcontext():
        from tinygpt.llm import LLM

        llm = LLM(**llm_arguments(args), **more)
        check(llm)
        if is_cpu:
            if logger.isEnabledFor(logging.DEBUG):
                _log_kernels(llm, args.threads)
            _compile_kernels(llm, args.kv_cache_dtype)
    return llm, clock.since(started)


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for next to no garbage in the block, and never among what is there at its end.

    Modules and a tokenizer are half a million objects to keep; looking for garbage among them took 0.1 s of a start.
    To compile a kernel takes seconds and leaves a lot: where that was done, all is looked through once.
    """
    thresholds, num_begun = gc.get_threshold(), compiling.ANNOUNCER.num_begun
    gc.set_threshold(COLLECT_AFTER)
    try:
        yield
        if compiling.ANNOUNCER.num_begun > num_begun:
            gc.collect()
        gc.freeze()
    finally:
        gc.set_threshold(*thresholds)


def note_threads(threads: int | Sequence[int] | None) -> None:
    """More threads than cores do the same work, and wait for one another."""
    given = (threads,) if isinstance(threads, int) else threads or ()
    most, num_cores = max(given, default=0), logical_cores()
    if num_cores < most <= MAX_THREADS:
        say(f"--threads is {most} and there are {counted(num_cores, 'core')}: more threads than cores are slower")


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
    os.environ.setdefault(*QUIET_THREADS)


def _log_kernels(llm: "LLM", threads: int | None) -> None:
    """What computes, and where what was compiled is kept."""
    from tinygpt.kernels.cpu.jit import kernel_files

    used = instructions()
    where = thread_count(threads), cpu_name(), used["target"], used[llm.dtype]
    logger.debug("%d threads on %s, with %s: %s", *where)
    files = kernel_files()
    logger.debug("%d compiled kernels in %s", len(files.names()), " and ".join(map(str, files.folders)) or "memory")


def _compile_kernels(llm: "LLM", kv_cache_dtype: str) -> None:
    """Take a step if this machine has not taken one with these kernels yet."""
    from tinygpt.compile_ahead import kernels_of
    from tinygpt.kernels.cpu.jit import cache_is_cold, mark_warm

    kernels = kernels_of(llm, kv_cache_dtype)
    if cache_is_cold(kernels):
        llm.generate([[0]], SamplingParams(max_tokens=1))
        mark_warm(kernels)


@contextmanager
def _share_compiled_meanwhile(args: argparse.Namespace) -> Iterator[None]:
    """On a first run, a second process compiles the draw of tokens while the block compiles a step.

    Numba compiles one kernel at a time in a process. The two meet in the folder of compiled kernels. What the second
    leaves undone, for whatever reason, is compiled here.
    """
    process = _start_compiling_share(args) if _is_first_run(args) else None
    if process is None:
        yield
        return
    try:
        yield
        with suppress(subprocess.TimeoutExpired), compiling.waited_for("the draw of tokens"):
            process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()


def _is_first_run(args: argparse.Namespace) -> bool:
    from tinygpt.kernels.cpu.jit import is_first_run

    return thread_count(args.threads) > 1 and is_first_run()


def _start_compiling_share(args: argparse.Namespace) -> subprocess.Popen | None:
    """None where no token is drawn, or no process can be started."""
    from tinygpt.sampling.metadata import Warpers

    if args.temperature <= 0:
        return None
    # A server has a temperature and no other flags of sampling: requests bring theirs.
    asked = {name: getattr(args, name) for name in Warpers._fields if hasattr(args, name)}
    nowhere = subprocess.DEVNULL
    with suppress(OSError):
        code = COMPILE_SHARE.format(sys.path, asked)
        return subprocess.Popen([sys.executable, "-c", code], stdin=nowhere, stdout=nowhere, stderr=nowhere)
    return None


def compile_draw(asked: dict[str, float | str]) -> None:
    """Compile what draws a token as the flags ask, by drawing one of two."""
    import numpy as np

    from tinygpt.execution.backend import load_backend
    from tinygpt.sampling.metadata import Warpers, warpers_of

    warpers = Warpers(*np.array(warpers_of(SamplingParams(**asked)), np.float64)[:, None])
    load_backend("cpu", "auto").sample(np.zeros((1, 2), np.float32), warpers, *np.zeros((3, 1), np.uint64))
