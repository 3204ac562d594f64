"""Mailbox: from the thread that takes steps to the event loop, which hands out what several steps have made at once."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

REST = 40  # times as long as a delivery has taken, the next one is put off: all of them take a fortieth of a core or so
MAX_REST = 0.06  # seconds, which nobody sees a text halt for


class Inbox:
    """What has come for one reader, for whom it waits. For the loop alone."""

    def __init__(self):
        self._waiting: list[Any] = []
        self._read: Callable[[list[Any]], None] | None = None

    def put(self, items: list[Any]) -> None:
        if self._read is None:
            self._waiting += items
        else:
            self._read(items)

    def read_by(self, read: Callable[[list[Any]], None]) -> None:
        """Have `read` called with what has come, and with whatever comes from now on. It must not raise."""
        self._read = read
        waiting, self._waiting = self._waiting, []
        if waiting:
            read(waiting)


class Mailbox:
    """Any thread may post; the loop delivers, to each reader all at once.

    The loop works on the cores that the kernels want too. So it rests between two deliveries, the longer the more there
    was to deliver: a stream gets each token as it comes if a step takes forty times as long as to deliver it, and else,
    like one of many, a few at a time. For what is urgent its reader does not wait, nor for what came before it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._posted: deque[tuple[Inbox, Any, bool]] = deque()
        self._is_called = False
        # Of the loop:
        self._is_resting = False
        self._sorted: dict[Inbox, list[Any]] = {}  # what waits for the end of the rest

    def post(self, inbox: Inbox, item: Any, is_urgent: bool = False) -> None:
        self._posted.append((inbox, item, is_urgent))
        if not self._is_called and (is_urgent or not self._is_resting):
            self._is_called = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_called = False  # first: what is posted from here on is delivered now, or calls again
        urgent = self._sort()
        if self._is_resting:
            for inbox in urgent:
                inbox.put(self._sorted.pop(inbox))
            return
        begun = time.thread_time()
        found, self._sorted = self._sorted, {}
        for inbox, items in found.items():
            inbox.put(items)
        self._is_resting = True
        self._loop.call_later(min((time.thread_time() - begun) * REST, MAX_REST), self._end_rest)

    def _end_rest(self) -> None:
        self._is_resting = False  # first, as above
        if self._posted or self._sorted:
            self._deliver()

    def _sort(self) -> list[Inbox]:
        """Sort what was posted by its readers. Returns those for whom something is urgent."""
        urgent: dict[Inbox, None] = {}
        while self._posted:
            inbox, item, is_urgent = self._posted.popleft()
            self._sorted.setdefault(inbox, []).append(item)
            if is_urgent:
                urgent[inbox] = None
        return list(urgent)
