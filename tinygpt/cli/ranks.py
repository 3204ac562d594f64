"""`--tensor-parallel` and `--pipeline-parallel`: a command that is to run on several ranks starts them, or is one."""

import argparse
import importlib.util
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

from tinygpt.errors import RequestError, how_to_install
from tinygpt.parallel.launched import find_mpiexec, is_first_of_host, launched_rank
from tinygpt.parallel.layout import Layout

OURS = "TINYGPT_LAUNCHED"  # in the environment of what `_launch` has started
USAGE = 2


def start_ranks(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Return in rank 0, or where there is to be one process. Another rank follows, and exits when rank 0 has ended.

    A process that no mpiexec has started becomes the one beside this Python, which starts the same command line.
    RequestError where ranks cannot be had. SIGTERM to rank 0 ends all of them, unless the command knows better.
    """
    layout = Layout.of(getattr(args, "tensor_parallel_size", 1), getattr(args, "pipeline_parallel_size", 1))
    if layout.size == 1:
        _speak()
        return
    if launched_rank() is None and OURS not in os.environ:
        _launch(layout, words)
    from tinygpt.parallel.ending import EndAtOnce
    from tinygpt.parallel.lead import lead_of
    from tinygpt.parallel.mpi import process_world, world_of

    if is_first_of_host():  # what a host lacks, others may have
        _speak()
    world = process_world()
    if world.rank == 0:
        world_of(layout)
        lead_of(world)  # now: a command line may be refused before any model is opened
        signal.signal(signal.SIGTERM, EndAtOnce(world))
        return
    if world.size != layout.size:  # as rank 0 says
        sys.exit(USAGE)
    _speak()
    from tinygpt.parallel.start import join

    join(layout, world)


@contextmanager
def one_of_all_speaks() -> Iterator[None]:
    """In the block, of processes that one mpiexec has started, those that are not rank 0 say nothing until
    `start_ranks` knows what they are for: what is wrong with a command line, and its help, rank 0 says for all."""
    if not launched_rank():
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        streams = [Unheard(nowhere, stream) for stream in (sys.stdout, sys.stderr)]
        with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
            try:
                yield
            finally:
                for stream in streams:
                    stream.detach()


class Unheard(io.TextIOWrapper):
    """What is written here goes nowhere; settings are those of the stream whose place it takes."""

    def __init__(self, nowhere: Any, stream: TextIO | None):
        super().__init__(nowhere, encoding="utf-8", errors="backslashreplace")
        self.stream = stream

    def reconfigure(self, **settings: Any) -> None:
        if isinstance(self.stream, io.TextIOWrapper):
            self.stream.reconfigure(**settings)


def _speak() -> None:
    if isinstance(sys.stderr, Unheard):
        sys.stdout, sys.stderr = sys.stdout.stream, sys.stderr.stream


def _launch(layout: Layout, words: Sequence[str]) -> None:
    mpiexec = find_mpiexec()
    if mpiexec is None or importlib.util.find_spec("mpi4py") is None:
        missing = "mpi4py" if mpiexec else "mpiexec"
        raise RequestError(
            f"tensor_parallel_size is {layout.tensor_size} and pipeline_parallel_size is {layout.pipeline_size}, which "
            f"needs {missing}: it comes with {how_to_install('mpi')}."
        )
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    command = [mpiexec, "-n", str(layout.size), sys.executable, "-m", "tinygpt", *words]
    os.execve(mpiexec, command, {**os.environ, OURS: "1"})
