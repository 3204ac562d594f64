"""Turns: work that runs beside the event loop, a piece at a time."""

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

from tinygpt.server.refusals.errors import queue_full
from tinygpt.server.work.threads import in_thread

Result = TypeVar("Result")


class Turns:
    """Each piece may keep all steps waiting, so that others' steps come between two of them. Who leaves ends his own
    behind the piece that runs.

    max_waiting: requests that may wait for their turn.
    """

    def __init__(self, max_waiting: float):
        self._max_waiting, self._num_waiting = max_waiting, 0
        self._lock = asyncio.Lock()

    async def run(self, pieces: Iterable[Callable[[], Result]]) -> list[Result]:
        """Their results. ApiError if too many wait already."""
        if self._num_waiting >= self._max_waiting:
            raise queue_full("too many requests are waiting.")
        self._num_waiting += 1
        try:
            return [await self._run_one(piece) for piece in pieces]
        finally:
            self._num_waiting -= 1

    async def _run_one(self, piece: Callable[[], Result]) -> Result:
        async with self._lock:
            return await in_thread(piece)
