"""From flags to a loaded model: thread pools, ranks under mpiexec, and SIGTERM as an exception."""

import argparse
import gc
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..errors import RequestError, Terminated, how_to_install
from ..hardware import thread_count
from ..ranks.mpi import Layout, find_mpiexec, launched_rank
from .flags import RANK_FLAGS, llm_args

if TYPE_CHECKING:
    from ..llm import LLM

# Each library reads its variable once, when it is imported.
LIBRARIES = ("NUMBA_NUM", "OMP_NUM", "OPENBLAS_NUM", "MKL_NUM", "VECLIB_MAXIMUM")
THREAD_POOLS = tuple(f"{library}_THREADS" for library in LIBRARIES)
LAUNCHED = "TINYGPT_LAUNCHED"  # a variable of the ranks that `_launch` starts
USAGE = 2


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise Terminated for the first SIGTERM in the block; ignore later ones."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set a handler
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def load_llm(args: argparse.Namespace, **more: Any) -> "tuple[LLM, float]":
    """Return the model of the flags, and the seconds to load it; `more` are arguments of LLM without a flag."""
    started = time.perf_counter()
    set_thread_pools(args.threads)
    gc.disable()  # modules and a tokenizer are half a million live objects: scanning them takes 0.1 s
    try:
        from ..llm import LLM, start_compiling_draw

        if args.device == "cpu" and args.temperature > 0 and thread_count(args.threads) > 1:
            start_compiling_draw()
        llm = LLM(**vars(llm_args(args, **more)))
        gc.freeze()
    finally:
        gc.enable()
    return llm, time.perf_counter() - started


def warm_up(llm: "LLM", args: argparse.Namespace) -> None:
    """Take a step if loading compiled kernels, so that rates contain less compilation."""
    if args.device != "cpu":
        return
    from ..kernels.cpu.jit import kernel_cache
    from ..sampling_params import SamplingParams

    if kernel_cache().num_compiled:
        params = SamplingParams(max_tokens=2, temperature=args.temperature, top_k=40, top_p=0.95, seed=0)
        llm.generate([[0]], params)


def set_thread_pools(threads: int | None) -> None:
    """Size the thread pools of libraries that are not imported yet; a variable stays if `threads` is None."""
    count = thread_count(threads)
    if "numba" in sys.modules:  # its pool has its size, and Numba refuses another one
        return
    for name in THREAD_POOLS:
        if threads is not None or name not in os.environ:
            os.environ[name] = str(count)
    # After NumPy is imported, OpenBLAS's threads spin for 50 ms on cores that the start needs. 4 is the least.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")


def has_ranks(args: argparse.Namespace) -> bool:
    return any(getattr(args, name, 1) != 1 for name in RANK_FLAGS)


def start_ranks(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Become mpiexec if it has not started this process. Return in rank 0; other ranks follow it, and exit."""
    if not has_ranks(args):
        return
    layout = Layout(args.tensor_parallel_size, args.pipeline_parallel_size)
    if launched_rank() is None and LAUNCHED not in os.environ:
        _launch(layout, words)
    from ..ranks.lead import driver_of
    from ..ranks.mpi import process_world, world_of

    world = process_world()
    if world.rank == 0:
        with suppress(OSError):  # not inherited
            os.dup2(int(os.environ.get(LAUNCHED, 1)), 1)
        world_of(layout)
        driver_of(world)  # now: a command line may be refused before any model is opened
        signal.signal(signal.SIGTERM, lambda number, _: world.abort(128 + number))
        return
    if world.size != layout.size:  # rank 0 reports it
        sys.exit(USAGE)
    from ..ranks.lead import join

    join(layout, world)


def _launch(layout: Layout, words: Sequence[str]) -> None:
    mpiexec = find_mpiexec()
    if mpiexec is None or importlib.util.find_spec("mpi4py") is None:
        missing = "mpi4py" if mpiexec else "mpiexec"
        raise RequestError(
            f"--tensor-parallel-size is {layout.tensor_size} and --pipeline-parallel-size is {layout.pipeline_size}, "
            f"which needs {missing}: it comes with {how_to_install('mpi')}."
        )
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    command = [mpiexec, "-n", str(layout.size), sys.executable, "-m", "tinygpt", *words]
    stdout = 1
    program = Path(mpiexec).resolve()
    if program.stem == "mpiexec" and program.with_name("mpiexec.hydra").is_file():  # MPICH
        stdout = os.dup(1)  # rank 0's; what MPICH itself says is no text
        os.set_inheritable(stdout, True)
        os.dup2(2, 1)
    os.execve(mpiexec, command, {**os.environ, LAUNCHED: str(stdout)})
