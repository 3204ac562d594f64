"""EventStream: a reply of server-sent events."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import Receive, Scope, Send

from tinygpt.errors import TinyGPTError
from tinygpt.server.refusals.errors import ApiError, bug_body, error_body

log = logging.getLogger("tinygpt.server")
PING_SECONDS = 15.0  # without an event, after which proxies and clients are told that there is still somebody
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
CONNECTION = "tinygpt.connection"  # in the scope's state, where our own server puts it
Write = Callable[[bytes], None]


class EventStream:
    """An ASGI app. events(write): writes one or several events at once, with their blank lines, until all are written.

    What goes wrong once the status has been sent is an event too, before the last one, [DONE].
    """

    def __init__(self, events: Callable[[Write], Awaitable[None]]):
        self._events = events
        self._num_written = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        async with _writer(scope, send) as write:
            pinging = asyncio.ensure_future(self._ping(write))
            try:
                await self._events(self._counted(write))
            except Exception as error:
                write(_error_event(error))
            finally:
                pinging.cancel()
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    def _counted(self, write: Write) -> Write:
        def counted(events: bytes) -> None:
            if events:
                self._num_written += 1
                write(events)

        return counted

    async def _ping(self, write: Write) -> None:
        while True:
            before = self._num_written
            await asyncio.sleep(PING_SECONDS)
            if self._num_written == before:
                write(PING)


@asynccontextmanager
async def _writer(scope: Scope, send: Send) -> AsyncIterator[Write]:
    """What writes a part of the body, and never waits for the client."""
    connection = scope["state"].get(CONNECTION)
    if connection is not None:
        yield connection.write
        return
    parts: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def send_all() -> None:
        while (part := await parts.get()) is not None:
            await send({"type": "http.response.body", "body": part, "more_body": True})

    sending = asyncio.ensure_future(send_all())
    try:
        yield parts.put_nowait
        parts.put_nowait(None)
        await sending
    finally:
        sending.cancel()


def event(value: dict[str, Any]) -> bytes:
    return f"data: {compact(value)}\n\n".encode()


def compact(value: Any) -> str:
    """JSON without spaces. ValueError for NaN and infinities, for which it has no numbers."""
    return _JSON.encode(value)


_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def _error_event(error: Exception) -> bytes:
    if isinstance(error, ApiError):
        return event(error.body)
    if isinstance(error, TinyGPTError):
        return event(error_body(500, str(error)))
    log.error("a stream was ended by a bug", exc_info=error)
    return event(bug_body())
