"""Mailbox: from the thread that takes steps to the event loop, with one wake-up for what a step has made."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any


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
    """Any thread may post; the loop delivers, to each reader all at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._posted: deque[tuple[Inbox, Any]] = deque()
        self._is_called = False

    def post(self, inbox: Inbox, item: Any) -> None:
        self._posted.append((inbox, item))
        if not self._is_called:
            self._is_called = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_called = False  # first: what is posted from here on is delivered now, or calls again
        found: dict[Inbox, list[Any]] = {}
        while self._posted:
            inbox, item = self._posted.popleft()
            found.setdefault(inbox, []).append(item)
        for inbox, items in found.items():
            inbox.put(items)
