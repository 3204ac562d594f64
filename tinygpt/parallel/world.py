"""World: what ranks need of whatever connects them. `mpi.py` is one, and tests have one of threads."""

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import numpy as np


class Group(Protocol):
    """Some ranks of a world: those that share a stage's layers."""

    # (3,) int64: the address of MPI_Allgather, or of a C function that is called as it is; its datatype for float32,
    # and its communicator
    allgather: np.ndarray


class World(Protocol):
    """All ranks. Each call that is not `send`, `receive` or `abort` is made by all of them, in one order."""

    rank: int
    size: int
    local_size: int  # ranks on this host
    host: str

    def broadcast(self, values: np.ndarray) -> None:
        """Fill int32 values with rank 0's. The others may wait for long, and sleep meanwhile."""

    def broadcast_object(self, value: Any = None) -> Any:
        """What rank 0 has given."""

    def gather_objects(self, value: Any) -> list[Any] | None:
        """What each rank has given, to rank 0; None to others."""

    def scatter_objects(self, values: list[Any] | None = None) -> Any:
        """One of those that rank 0 has given, each to another rank."""

    def send(self, values: np.ndarray, rank: int) -> None:
        """Give float32 values to a rank, which receives them."""

    def receive(self, values: np.ndarray, rank: int) -> None:
        """Fill float32 values with those that a rank sends."""

    def receive_later(self, values: np.ndarray, rank: int) -> Callable[[], Any]:
        """As `receive`, while this rank does something else; what is returned waits for them."""

    def group(self, ranks: list[int]) -> Group:
        """Those ranks, of which this is one. Every rank asks for its own group."""

    def abort(self, status: int) -> NoReturn:
        """End all ranks at once, wherever they are."""
