"""Ranks that are threads of this process: a World without MPI, for tests.

What a kernel calls in place of MPI_Allgather is Python here. `delivered` says in which order the parts of the ranks are
handed over by a rank's i-th call, so that a test may have them mixed up.
"""

import atexit
import ctypes
import hashlib
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import Queue
from typing import Any, NoReturn

import numpy as np

import tinygpt.llm
from tinygpt import LLM
from tinygpt.ranks import lead as lead_module
from tinygpt.ranks import rank as rank_module
from tinygpt.ranks.lead import Ranks, RankZeroDriver, follow
from tinygpt.ranks.mpi import Layout

_HALF = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
ALLGATHER = ctypes.CFUNCTYPE(ctypes.c_int, *_HALF, *_HALF, ctypes.c_int64)
PATIENCE = 600  # seconds after which a rank that waits gives up: a test that hangs says nothing


class Aborted(Exception):
    """A rank has ended all."""


class Meeting:
    """Where the ranks of a group exchange what they have."""

    def __init__(self, size: int):
        self._barrier = threading.Barrier(size)
        self._values = [None] * size
        self.abort = self._barrier.abort

    def exchange(self, place: int, value: Any) -> list[Any]:
        """What each has brought, to all of them."""
        self._values[place] = value
        self._barrier.wait(PATIENCE)
        values = list(self._values)
        self._barrier.wait(PATIENCE)
        return values


class Threads:
    """What all ranks of one world share."""

    def __init__(self, size: int, delivered: Callable[[int], Sequence[int]] | None = None):
        self.size, self.delivered = size, delivered
        self.meeting = Meeting(size)
        self.groups: dict[tuple[int, ...], Meeting] = {}
        self.mail: dict[tuple[int, int], Queue] = {(a, b): Queue() for a in range(size) for b in range(size)}
        self.lock = threading.Lock()
        self.num_broadcasts = 0
        self.num_sent = 0  # float32 values that went from one rank to another
        self.num_scattered = 0  # numbers in arrays that rank 0 has given to others
        self.aborted: int | None = None
        self.followers: list[threading.Thread] = []

    def abort(self, status: int) -> None:
        self.aborted = status
        for meeting in (self.meeting, *self.groups.values()):
            meeting.abort()
        for letters in self.mail.values():
            letters.put(Aborted())

    def letter(self, sender: int, receiver: int) -> Any:
        """What the one has sent to the other. Aborted once a rank has ended all."""
        found = self.mail[sender, receiver].get(timeout=PATIENCE)
        if isinstance(found, Aborted):
            raise found
        return found


class ThreadWorld:
    """One rank's view: the interface of tinygpt.ranks.mpi.World."""

    host = "here"

    def __init__(self, threads: Threads, rank: int):
        self._threads, self.rank, self.size, self.local_size = threads, rank, threads.size, threads.size

    def broadcast(self, values: np.ndarray) -> None:
        values[:] = self.broadcast_object(values.copy() if self.rank == 0 else None)

    def broadcast_object(self, value: Any = None) -> Any:
        if self.rank == 0:
            self._threads.num_broadcasts += 1
            for rank in range(1, self.size):
                self._threads.mail[0, rank].put(value)
            return value
        return self._threads.letter(0, self.rank)

    def gather_objects(self, value: Any) -> list[Any] | None:
        found = self._threads.meeting.exchange(self.rank, value)
        return found if self.rank == 0 else None

    def scatter_objects(self, values: list[Any] | None = None) -> Any:
        if self.rank:
            return self._threads.letter(0, self.rank)
        for rank in range(1, self.size):
            self._threads.mail[0, rank].put(values[rank])
            self._threads.num_scattered += sum(array.size for array in values[rank])
        return values[0]

    def send(self, values: np.ndarray, rank: int) -> None:
        assert values.flags.c_contiguous
        assert values.dtype == np.float32
        self._threads.num_sent += values.size
        self._threads.mail[self.rank, rank].put(values.copy())

    def receive(self, values: np.ndarray, rank: int) -> None:
        assert values.flags.c_contiguous
        values[...] = self._threads.letter(rank, self.rank)

    def receive_later(self, values: np.ndarray, rank: int) -> Callable[[], Any]:
        return partial(self.receive, values, rank)

    def allgather(self, ranks: list[int]) -> np.ndarray:
        with self._threads.lock:
            meeting = self._threads.groups.setdefault(tuple(ranks), Meeting(len(ranks)))
        # Kernels have its address.
        self._group = ThreadGroup(self._threads, meeting, ranks.index(self.rank), len(ranks))
        return np.array([ctypes.cast(self._group.function, ctypes.c_void_p).value, 0, 0], np.int64)

    def abort(self, status: int) -> NoReturn:
        self._threads.abort(status)
        raise Aborted


class ThreadGroup:
    def __init__(self, threads: Threads, meeting: Meeting, place: int, size: int):
        self._threads = threads
        self._meeting = meeting
        self._place = place
        self._size = size
        self.function = ALLGATHER(self._allgather)
        self._num_calls = 0

    def _allgather(self, send, count, datatype, receive, receive_count, receive_type, communicator) -> int:
        try:
            mine = np.ctypeslib.as_array(ctypes.cast(send, ctypes.POINTER(ctypes.c_float)), (count,))
            parts = self._meeting.exchange(self._place, mine.copy())
            delivered = self._threads.delivered
            order = range(self._size) if delivered is None else delivered(self._num_calls)
            self._num_calls += 1
            into = np.ctypeslib.as_array(
                ctypes.cast(receive, ctypes.POINTER(ctypes.c_float)), (self._size, count)
            )
            into[...] = [parts[i] for i in order]
            self._threads.num_sent += count * (self._size - 1)
        except threading.BrokenBarrierError:
            return 1
        return 0


def running(threads: Threads, follow: Callable[[ThreadWorld], None]) -> ThreadWorld:
    """Have all ranks but 0 follow in threads of their own; rank 0's world."""

    def run(world: ThreadWorld) -> None:
        with suppress(Aborted):
            follow(world)

    others = [ThreadWorld(threads, rank) for rank in range(1, threads.size)]
    threads.followers = [threading.Thread(target=run, args=(world,), daemon=True) for world in others]
    for follower in threads.followers:
        follower.start()
    return ThreadWorld(threads, 0)


OPTIONS = {"threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 40}


def sized(layout: Layout) -> dict[str, int]:
    sizes = {"tensor_parallel_size": layout.tensor_size, "pipeline_parallel_size": layout.pipeline_size}
    return {**OPTIONS, **sizes}


@contextmanager
def on_ranks(monkeypatch, layout, model, delivered=None, **options):
    """An LLM over ranks that are threads, and what they share. Pipelines cut small steps and batches, too."""
    monkeypatch.setattr(rank_module, "TOKENS_OF_A_READING", 4)
    monkeypatch.setattr(lead_module, "LEAST_GROUP", 1)
    layout = Layout(*layout)
    threads = Threads(layout.size, delivered)
    lead = RankZeroDriver(running(threads, follow))
    monkeypatch.setattr(tinygpt.llm, "_ranks", lambda args: Ranks(lead, args.layout))
    try:
        with LLM(model, **{**sized(layout), **options}) as llm:
            yield llm, threads
    except BaseException:
        atexit.unregister(lead.end)
        threads.abort(1)
        raise
    lead.end()


def digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()[
        :16
    ]
