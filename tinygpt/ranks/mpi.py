"""Ranks, the processes that mpiexec has started: how they are laid out and joined by MPI; imports fast."""

import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import INTERRUPTS, RequestError, TinyGPTError, how_to_install
from ..fields import PIPELINE_SIZE, TENSOR_SIZE, read_field
from ..hardware import launched_size, physical_cores

if TYPE_CHECKING:
    import numpy as np

SPIN_SECONDS = 0.005  # of polling without a nap
FIRST_NAP = 20e-6
LONGEST_NAP = 1e-3
SHARED_MEMORY = "/dev/shm/mpich_shm_"  # stays if ranks are killed
FAILED = 1  # exit code

logger = logging.getLogger(__name__)


def mpiexec_beside() -> str | None:
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent))


def find_mpiexec() -> str | None:
    return mpiexec_beside() or shutil.which("mpiexec")


@dataclass(frozen=True)
class Layout:
    """`pipeline_size` stages of `tensor_size` neighboring ranks, which share a stage's layers."""

    tensor_size: int = 1
    pipeline_size: int = 1

    def __post_init__(self):
        read_field("tensor_parallel_size", self.tensor_size, TENSOR_SIZE)
        read_field("pipeline_parallel_size", self.pipeline_size, PIPELINE_SIZE)

    @property
    def size(self) -> int:
        return self.tensor_size * self.pipeline_size

    def rank_at(self, stage: int, tensor_rank: int) -> int:
        return stage * self.tensor_size + tensor_rank

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return (stage, index in it)."""
        return divmod(rank, self.tensor_size)

    def tensor_group(self, rank: int) -> list[int]:
        stage, _ = self.place_of(rank)
        return [self.rank_at(stage, t) for t in range(self.tensor_size)]


def world_of(layout: Layout) -> "World":
    """Raise RequestError if the size is not the layout's."""
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


def rank_threads(threads: int | None, world: "World") -> int:
    return max(physical_cores() // world.local_size, 1) if threads is None else threads


class World:
    """All ranks of the program, which make the same calls but send, receive and abort."""

    def __init__(self, mpi: Any):
        self._mpi = mpi
        self._all = mpi.COMM_WORLD.Dup()
        local = self._all.Split_type(mpi.COMM_TYPE_SHARED)  # of this host
        self.rank = self._all.rank
        self.size = self._all.size
        self.local_size = local.size
        self.host = mpi.Get_processor_name()
        self._groups: dict[tuple[int, ...], tuple[Any, np.ndarray]] = {}  # kept: MPI has some thousand
        local.Barrier()  # then the shared memory needs no name
        if local.rank == 0:
            _unlink_shared_memory()

    def broadcast(self, values: "np.ndarray") -> None:
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

    def send(self, values: "np.ndarray", rank: int) -> None:
        self._all.Send(values, rank)

    def receive(self, values: "np.ndarray", rank: int) -> None:
        self._all.Recv(values, rank)

    def receive_later(self, values: "np.ndarray", rank: int) -> Callable[[], Any]:
        """Return a function that waits."""
        return self._all.Irecv(values, rank).Wait

    def allgather(self, ranks: list[int]) -> "np.ndarray":
        """Return the call that joins rows of `ranks`, which share a stage's layers, without the GIL.

        (3,) int64: the address of MPI_Allgather, its datatype for float32, and the communicator.
        """
        from ctypes import CDLL, c_void_p, cast

        import numpy as np

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


def end_all(world: World, error: BaseException) -> NoReturn:
    logger.debug("a step over several ranks has failed", exc_info=error)
    what = str(error) if isinstance(error, TinyGPTError) else repr(error)
    failed = f"error: rank {world.rank} of {world.size}, on {world.host}: {what}", FAILED
    said, status = INTERRUPTS.get(type(error), failed)
    with suppress(OSError, ValueError):  # closed, or a full disk
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        print(f"tinygpt: {said}", file=sys.stderr, flush=True)
    world.abort(status)


def _unlink_shared_memory() -> None:
    with suppress(OSError):
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            paths = {line.split()[5] for line in file if SHARED_MEMORY in line}
        for path in paths:
            with suppress(OSError):
                os.unlink(path)
