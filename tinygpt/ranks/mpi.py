"""The ranks that mpiexec has started, and their messages."""

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from ctypes import CDLL, c_void_p, cast
from functools import cache
from typing import Any, NoReturn

import numpy as np

from ..errors import INTERRUPTS, RequestError, TinyGPTError, how_to_install
from .launch import Layout, launched_size, mpiexec_beside

FAILED = 1  # exit code

logger = logging.getLogger(__name__)


def end_all(world: "World", error: BaseException) -> NoReturn:
    """Print this rank's error and end all ranks."""
    logger.debug("a step over several ranks has failed", exc_info=error)
    what = str(error) if isinstance(error, TinyGPTError) else repr(error)
    failed = f"error: rank {world.rank} of {world.size}, on {world.host}: {what}", FAILED
    said, status = INTERRUPTS.get(type(error), failed)
    with suppress(OSError, ValueError):  # closed, or a full disk
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        print(f"tinygpt: {said}", file=sys.stderr, flush=True)
    world.abort(status)


SPIN_SECONDS = 0.005  # of polling without a nap
FIRST_NAP, LONGEST_NAP = 20e-6, 1e-3
SHARED_MEMORY = "/dev/shm/mpich_shm_"  # stays if ranks are killed


def world_of(layout: Layout) -> "World":
    """Return `process_world`. Raise RequestError if its size is not the layout's."""
    world = process_world()
    if world.size != layout.size:
        raise RequestError(
            f"tensor_parallel_size {layout.tensor_size} x pipeline_parallel_size {layout.pipeline_size} takes "
            f"{layout.size} processes and mpiexec has started {world.size}: give it -n {layout.size}."
        )
    return world


@cache
def process_world() -> "World":
    """Return the world of this process. Raise RequestError without MPI or under another's mpiexec."""
    try:
        import mpi4py

        mpi4py.rc.thread_level = "serialized"  # the engine's threads take turns
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of what is refused below
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RequestError(
            f"several ranks need mpi4py and an MPI library ({error}): {how_to_install('mpi')}."
        ) from None
    if MPI.COMM_WORLD.size == 1 < launched_size():
        name = MPI.get_vendor()[0]
        beside = mpiexec_beside()
        its_mpiexec = f", {beside}" if beside else ""
        raise RequestError(
            f"{launched_size()} processes were started, and {name}, the MPI of mpi4py, sees each of them alone: start "
            f"them with the mpiexec of {name}{its_mpiexec}, or install mpi4py for the other MPI."
        )
    return World(MPI)


class World:
    """All ranks of the program, which make the same calls but send, receive and abort."""

    def __init__(self, mpi: Any):
        self._mpi, self._all = mpi, mpi.COMM_WORLD.Dup()
        local = self._all.Split_type(mpi.COMM_TYPE_SHARED)  # of this host
        self.rank, self.size, self.local_size = self._all.rank, self._all.size, local.size
        self.host = mpi.Get_processor_name()
        self._groups: dict[tuple[int, ...], tuple[Any, np.ndarray]] = {}  # kept: MPI has some thousand
        local.Barrier()  # then the shared memory needs no name
        if local.rank == 0:
            _unlink_shared_memory()

    def broadcast(self, values: np.ndarray) -> None:
        """Fill int32 values with rank 0's. Other ranks sleep meanwhile."""
        request = self._all.Ibcast(values, 0)
        if self.rank == 0:
            request.Wait()
            return
        deadline = time.monotonic() + SPIN_SECONDS
        nap = FIRST_NAP
        while not request.Test():
            if time.monotonic() > deadline:
                time.sleep(nap)
                nap = min(2 * nap, LONGEST_NAP)

    def broadcast_object(self, value: Any = None) -> Any:
        return self._all.bcast(value, 0)

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Return all ranks' values on rank 0, None elsewhere."""
        return self._all.gather(value, 0)

    def scatter_objects(self, values: list[Any] | None = None) -> Any:
        return self._all.scatter(values, 0)

    def send(self, values: np.ndarray, rank: int) -> None:
        self._all.Send(values, rank)

    def receive(self, values: np.ndarray, rank: int) -> None:
        self._all.Recv(values, rank)

    def receive_later(self, values: np.ndarray, rank: int) -> Callable[[], Any]:
        """Return a function that waits."""
        return self._all.Irecv(values, rank).Wait

    def allgather(self, ranks: list[int]) -> np.ndarray:
        """Return the call that joins rows of `ranks`, which share a stage's layers, without the GIL.

        (3,) int64: the address of MPI_Allgather, its datatype for float32, and the communicator.
        """
        key = tuple(ranks)
        if key not in self._groups:  # Split is collective
            communicator = self._all.Split(ranks[0], self.rank)
            function = cast(CDLL(self._mpi.__file__).MPI_Allgather, c_void_p).value
            handles = self._mpi._handleof(self._mpi.FLOAT), self._mpi._handleof(communicator)
            # MPICH's handles are ints, whose sign a 64-bit register carries on.
            numbers = np.array([function, *(handle % 2**64 for handle in handles)], np.uint64).view(np.int64)
            self._groups[key] = communicator, numbers
        return self._groups[key][1]

    def abort(self, status: int) -> NoReturn:
        with suppress(OSError):  # MPI would print a second message
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        self._all.Abort(status)


def _unlink_shared_memory() -> None:
    with suppress(OSError):
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            paths = {line.split()[5] for line in file if SHARED_MEMORY in line}
        for path in paths:
            with suppress(OSError):
                os.unlink(path)
