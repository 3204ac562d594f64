"""Mailbox: from the thread that takes steps to the event loop, which hands out what several steps have made at once."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from tinygpt.engine.step_loop import STREAM_SECONDS

REST = 40  # times as long as a delivery has taken, the next one is put off: a fortieth of a core, up to MAX_REST
MAX_REST = 0.9 * STREAM_SECONDS  # shorter than a call of the engine, so that what the next one brings need not wait


class Inbox:
    """What has come for one reader, for whom it waits. Any thread may put; all else is the loop's."""

    def __init__(self):
        self._items: deque[Any] = deque()
        self._read: Callable[[list[Any]], None] | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)

    def read_by(self, read: Callable[[list[Any]], None]) -> None:
        """Have `read` called with what has come, and with whatever comes from now on. It must not raise."""
        self._read = read
        self.deliver()

    def deliver(self) -> None:
        """Have all that has come be read at once, if there is a reader."""
        if self._items and self._read is not None:
            self._read([self._items.popleft() for _ in range(len(self._items))])


class Mailbox:
    """Any thread may post; the loop delivers, to each reader all at once.

    The loop works on the cores that the kernels want too. So it rests between two deliveries, the longer the more there
    was to deliver: a stream gets each token as it comes if a step takes forty times as long as to deliver it, and else,
    like one of many, a few at a time. For what is urgent its reader does not wait, nor for what came before it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._changed: deque[Inbox] = deque()  # one several times: it is delivered the first time
        self._urgent: deque[Inbox] = deque()
        self._is_called = False
        self._is_resting = False  # by the loop

    def post(self, inbox: Inbox, item: Any, is_urgent: bool = False) -> None:
        inbox.put(item)
        (self._urgent if is_urgent else self._changed).append(inbox)
        if not self._is_called and (is_urgent or not self._is_resting):
            self._is_called = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_called = False  # first: what is posted from here on is delivered now, or calls again
        begun = time.thread_time()
        _deliver_all(self._urgent)
        if not self._is_resting:
            _deliver_all(self._changed)
            self._is_resting = True
            self._loop.call_later(min((time.thread_time() - begun) * REST, MAX_REST), self._end_rest)

    def _end_rest(self) -> None:
        self._is_resting = False  # first, as above
        if self._changed:
            self._deliver()


def _deliver_all(inboxes: deque[Inbox]) -> None:
    for _ in range(len(inboxes)):  # and no more: others come meanwhile
        inboxes.popleft().deliver()
