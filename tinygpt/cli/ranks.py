"""`--tensor-parallel` and `--pipeline-parallel`: a command that is to run on several ranks starts them, or is one."""

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tinygpt.errors import RequestError, how_to_install
from tinygpt.parallel.layout import Layout

# What MPICH, Open MPI and ours leave in the environment of a process that they start.
LAUNCHED = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "TINYGPT_LAUNCHED")
USAGE = 2


def start_ranks(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Return in rank 0, or where there is to be one process. Another rank follows, and exits when rank 0 has ended.

    A process that no mpiexec has started becomes the one beside this Python, which starts the same command line.
    RequestError where ranks cannot be had.
    """
    layout = Layout.of(getattr(args, "tensor_parallel_size", 1), getattr(args, "pipeline_parallel_size", 1))
    if layout.size == 1:
        return
    if not any(name in os.environ for name in LAUNCHED):
        _launch(layout, words)
    from tinygpt.parallel.mpi import process_world
    from tinygpt.parallel.start import join

    try:
        join(layout.tensor_size, layout.pipeline_size)
    except RequestError:
        if process_world().rank:  # rank 0 says it
            sys.exit(USAGE)
        raise


def _launch(layout: Layout, words: Sequence[str]) -> None:
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if mpiexec is None or importlib.util.find_spec("mpi4py") is None:
        missing = "mpi4py" if mpiexec else "mpiexec"
        raise RequestError(
            f"tensor_parallel_size is {layout.tensor_size} and pipeline_parallel_size is {layout.pipeline_size}, which "
            f"needs {missing}: it comes with {how_to_install('mpi')}."
        )
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    command = [mpiexec, "-n", str(layout.size), sys.executable, "-m", "tinygpt", *words]
    os.execve(mpiexec, command, {**os.environ, "TINYGPT_LAUNCHED": "1"})
