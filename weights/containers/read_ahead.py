"""Checksums of parts of a file, computed in threads a few parts ahead of the one that is read."""

import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

# Enough that a loader seldom waits, and so few, and of so few bytes, that little of the file is in memory before it is
# needed: behind a model may lie an optimizer's state, which nobody reads.
AHEAD, AHEAD_BYTES = 4, 2**25


class Part(Protocol):
    """An archive's entry, or a variable: some bytes of a file that have a checksum."""

    name: str
    data: range

    def verify(self) -> None:
        """Raises CheckpointError unless the bytes have their checksum."""


class ReadAhead:
    """Verifies parts in the order in which they lie in the file: checksums let go of the interpreter's lock."""

    def __init__(self, parts: Iterable[Part]):
        self._parts = sorted(parts, key=lambda part: part.data.start)
        self._index = {part.name: i for i, part in enumerate(self._parts)}
        self._results: dict[tuple[int, int], Future[None]] = {}  # by process, as a fork has none of these threads
        self._lock = threading.Lock()

    def verify(self, part: Part) -> None:
        """Raises CheckpointError unless the part has its checksum, which is computed once."""
        process, index = os.getpid(), self._index[part.name]
        with self._lock:
            for i in range(index, min(index + AHEAD, len(self._parts))):
                if i > index and self._parts[i].data.stop - part.data.stop > AHEAD_BYTES:
                    break
                if (process, i) not in self._results:
                    self._results[process, i] = _begin(self._parts[i])
        self._results[process, index].result()


def _begin(part: Part) -> Future[None]:
    reader = ThreadPoolExecutor(1)
    future = reader.submit(part.verify)
    reader.shutdown(wait=False)
    return future
