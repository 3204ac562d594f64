"""EventStream: a reply of server-sent events."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from tinygpt.errors import TinyGPTError
from tinygpt.server.refusals.errors import ApiError, bug_body, error_body
from tinygpt.server.transport.own import connection_of

log = logging.getLogger("tinygpt.server")
HEAD_SECONDS = 0.1  # that the head of a reply waits for the first event, to go with it
PING_SECONDS = 15.0  # without an event, after which proxies and clients are told that there is still somebody
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


class Write(Protocol):
    """Write one or several events, with their blank lines. is_last: the end follows at once, and may go with them."""

    def __call__(self, events: bytes, is_last: bool = False) -> None: ...


class EventStream:
    """An ASGI app. events(write): writes events until all are written.

    What goes wrong once the status has been sent is an event too, before the last one, [DONE].
    """

    def __init__(self, events: Callable[[Write], Awaitable[None]]):
        self._events = events
        self._num_written = 0
        self._last = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        connection = connection_of(scope)
        if connection is None:
            async with _writer(send) as write:
                await self._write_all(write)
        else:
            flushing = asyncio.get_running_loop().call_later(HEAD_SECONDS, connection.flush)
            try:
                await self._write_all(connection.write)
            finally:
                flushing.cancel()
            connection.keep()
        await send({"type": "http.response.body", "body": self._last + DONE, "more_body": False})

    async def _write_all(self, write: Callable[[bytes], None]) -> None:
        def noted(events: bytes, is_last: bool = False) -> None:
            if is_last:
                self._last += events
            elif events:
                self._num_written += 1
                write(events)

        self._ping_later(write)
        try:
            await self._events(noted)
        except Exception as error:
            self._last += _error_event(error)
        finally:
            self._pinging.cancel()

    def _ping_later(self, write: Callable[[bytes], None]) -> None:
        self._pinging = asyncio.get_running_loop().call_later(PING_SECONDS, self._ping, write, self._num_written)

    def _ping(self, write: Callable[[bytes], None], num_before: int) -> None:
        if self._num_written == num_before:
            write(PING)
        self._ping_later(write)


@asynccontextmanager
async def _writer(send: Send) -> AsyncIterator[Callable[[bytes], None]]:
    """What writes a part of the body behind any server, and never waits for the client."""
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
