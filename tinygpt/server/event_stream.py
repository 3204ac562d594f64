"""EventStream: a reply of server-sent events, written as fast as its client reads."""

from collections.abc import AsyncIterator

from starlette.types import Receive, Scope, Send

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"


class EventStream:
    """events: bytes, each one or several events with their blank lines."""

    def __init__(self, events: AsyncIterator[bytes]):
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        try:
            async for events in self._events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
        finally:
            await self._events.aclose()
        await send({"type": "http.response.body", "body": DONE, "more_body": False})
