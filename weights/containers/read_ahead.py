"""Checksums of an archive's entries, computed in threads a few entries ahead of the one that is read."""

import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from tinygpt.weights.containers.zip_entries import ZipEntry

# Enough that a loader seldom waits, and so few that little of the file is in memory before it is needed.
AHEAD = 4


class ReadAhead:
    """Verifies entries in the order in which they lie in the file: zlib lets go of the interpreter's lock."""

    def __init__(self, entries: Iterable[ZipEntry]):
        self._entries = sorted(entries, key=lambda entry: entry.data.start)
        self._index = {entry.name: i for i, entry in enumerate(self._entries)}
        self._results: dict[tuple[int, int], Future[None]] = {}  # by process, as a fork has none of these threads
        self._lock = threading.Lock()

    def verify(self, entry: ZipEntry) -> None:
        """Raises CheckpointError unless the entry has its checksum, which is computed once."""
        process, index = os.getpid(), self._index[entry.name]
        with self._lock:
            for i in range(index, min(index + AHEAD, len(self._entries))):
                if (process, i) not in self._results:
                    self._results[process, i] = _begin(self._entries[i])
        self._results[process, index].result()


def _begin(entry: ZipEntry) -> Future[None]:
    reader = ThreadPoolExecutor(1)
    future = reader.submit(entry.verify)
    reader.shutdown(wait=False)
    return future
