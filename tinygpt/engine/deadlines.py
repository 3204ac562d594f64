"""Deadlines: which sequences' time is over, without looking at all of them in every step."""

import heapq
import itertools
from collections import deque
from math import inf

from tinygpt.request.sequence import Sequence


class Deadlines:
    """The sequences that have a deadline, the earliest at hand. Several threads may add; one asks."""

    def __init__(self):
        self._added: deque[Sequence] = deque()
        self._heap: list[tuple[float, int, Sequence]] = []
        self._numbers = itertools.count()  # what orders equal deadlines
        self._size_to_prune = 64

    def add(self, sequence: Sequence) -> None:
        if sequence.deadline is not None:
            self._added.append(sequence)

    def pop_expired(self, now: float) -> list[Sequence]:
        """Those whose deadline lies before `now` and that have not ended, each once."""
        while self._added:
            sequence = self._added.popleft()
            heapq.heappush(self._heap, (sequence.deadline, next(self._numbers), sequence))
        self._prune()
        expired = []
        while self._heap and self._heap[0][0] <= now:
            expired.append(heapq.heappop(self._heap)[2])
        return [sequence for sequence in expired if not sequence.is_finished]

    def seconds_left(self, now: float) -> float:
        """To the earliest that `pop_expired` has left; infinity: there is none."""
        return self._heap[0][0] - now if self._heap else inf

    def _prune(self) -> None:
        """Let go of those that have ended long before their time, once they may be half of all."""
        if len(self._heap) >= self._size_to_prune:
            self._heap = [item for item in self._heap if not item[2].is_finished]
            heapq.heapify(self._heap)
            self._size_to_prune = max(64, 2 * len(self._heap))
