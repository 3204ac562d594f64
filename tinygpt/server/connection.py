"""Connections: JSON bodies of a limited size, streams of events, and clients that leave."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinygpt.errors import TinyGPTError
from tinygpt.server.errors import BUG, ApiError, error_body, from_engine
from tinygpt.server.replies import DONE, event

log = logging.getLogger("tinygpt.server")
SSE = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}

Result = TypeVar("Result")


class JsonRoute(APIRoute):
    """A route whose body must be JSON of a limited size."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            if request.method == "POST":
                request._body = await _read_body(request)  # FastAPI reads it from here
            return await handle(request)

        return answer


async def _read_body(request: Request) -> bytes:
    config = request.app.state.api.config
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a web page of another site cannot send this type without permission
        raise ApiError(415, f"Content-Type is {kind!r} and must be application/json.")
    declared, limit, body = request.headers.get("content-length", ""), config.max_body_bytes, bytearray()
    too_large = ApiError(413, f"the body is longer than the {limit} bytes that this server reads.")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise too_large
    if config.enable_log_requests:
        fields = {"id": request.state.id, "body": body.decode(errors="replace")}
        logging.getLogger("tinygpt.server.access").info("body", extra={"fields": fields})
    return bytes(body)


class EventStream(Response):
    """A reply of server-sent events, which ends its work when the client leaves. An error is the last event."""

    def __init__(self, written: AsyncIterator[bytes], end: Callable[[], None]):
        """end: called once, however the reply ends, also if it never begins."""
        super().__init__()
        self._written, self._end = written, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await while_connected(receive, self._send(send))
        finally:
            self._end()

    async def _send(self, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in SSE.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        last = DONE
        try:
            async for part in self._written:
                if part:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except ApiError as error:
            last = event(error_body(error)) + DONE
        except TinyGPTError as error:
            last = event(error_body(from_engine(error))) + DONE
        except Exception:
            log.exception("a bug ended a stream")
            last = event(error_body(BUG)) + DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of the work, or cancel it and raise ClientDisconnect when the client leaves."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(until_gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
