"""Mailbox: from the thread that takes steps to the event loop, with one wake-up for what a step has made."""

import asyncio
from collections import deque
from typing import Any


class Inbox:
    """What has come for one reader, a task of the loop."""

    def __init__(self):
        self._items: list[Any] = []
        self._has_come = asyncio.Event()

    def put(self, item: Any) -> None:
        """In the loop alone."""
        self._items.append(item)
        self._has_come.set()

    async def take(self) -> list[Any]:
        """All that has come, once there is something."""
        await self._has_come.wait()
        self._has_come.clear()
        items, self._items = self._items, []
        return items


class Mailbox:
    """Any thread may post; the loop delivers."""

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
        while self._posted:
            inbox, item = self._posted.popleft()
            inbox.put(item)
