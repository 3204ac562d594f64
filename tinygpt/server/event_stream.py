"""EventStream: a reply of server-sent events."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Receive, Scope, Send

from tinygpt.errors import TinyGPTError
from tinygpt.server.errors import ApiError, error_body

log = logging.getLogger("tinygpt.server")
PING_SECONDS = 15.0  # without an event, after which proxies and clients are told that there is still somebody
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


class EventStream:
    """An ASGI app. events: bytes, each piece one or several events with their blank lines.

    What goes wrong once the status has been sent is an event too, before the last one, [DONE].
    """

    def __init__(self, events: AsyncIterator[bytes]):
        self._events = events
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        pinging = asyncio.ensure_future(self._ping(send))
        try:
            async for events in self._events:
                self._num_sent += 1
                await send({"type": "http.response.body", "body": events, "more_body": True})
        except Exception as error:
            await send({"type": "http.response.body", "body": _error_event(error), "more_body": True})
        finally:
            pinging.cancel()
            await self._events.aclose()
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _ping(self, send: Send) -> None:
        while True:
            before = self._num_sent
            await asyncio.sleep(PING_SECONDS)
            if self._num_sent == before:
                await send({"type": "http.response.body", "body": PING, "more_body": True})


def event(value: dict[str, Any]) -> bytes:
    return f"data: {compact(value)}\n\n".encode()


def compact(value: Any) -> str:
    """JSON without spaces. ValueError for NaN and infinities, for which it has no numbers."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _error_event(error: Exception) -> bytes:
    if isinstance(error, ApiError):
        return event(error.body)
    if isinstance(error, TinyGPTError):
        return event(error_body(500, str(error)))
    log.error("a stream was ended by a bug", exc_info=error)
    return event(error_body(500, "internal error: the server's log says more."))
