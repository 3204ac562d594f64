"""RestOfBody: where a connection closes behind a reply, the client is heard out first."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinygpt.server.transport.connection import PATIENCE


class RestOfBody:
    """ASGI middleware, around all other. What a reply has left unread of a body is read and thrown away, for PATIENCE
    at most, before the connection closes.

    A socket that is closed with bytes unread resets its connection: a client that sends all before it reads would lose
    the reply that says why it is refused. Where the connection stays open, uvicorn reads on by itself.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        closes = scope.get("http_version", "1.1") < "1.1" or _asks_to_close(scope["headers"])
        is_read = is_held_back = False

        async def receive_and_note() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = not message.get("more_body", False)  # or its client has left
            return message

        async def send_all_but_the_end(message: Message) -> None:
            nonlocal closes, is_held_back
            if message["type"] == "http.response.start":
                closes = closes or _asks_to_close(message["headers"])
            elif closes and not is_read and not message.get("more_body", False):
                is_held_back, message = True, {**message, "more_body": True}
            await send(message)

        await self._app(scope, receive_and_note, send_all_but_the_end)
        if is_held_back:
            with suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(_read_all(receive), PATIENCE)
            await send({"type": "http.response.body", "body": b""})


async def _read_all(receive: Receive) -> None:
    while (await receive()).get("more_body", False):
        pass


def _asks_to_close(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name.lower() == b"connection" and b"close" in value.lower() for name, value in headers)
