"""Endpoint: one route: its body is read and checked, and all work for it ends when its client leaves."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinygpt.errors import TinyGPTError
from tinygpt.server.protocol.fields import Strict
from tinygpt.server.record import record_of
from tinygpt.server.refusals.errors import ApiError, from_engine
from tinygpt.server.state import ServerState
from tinygpt.server.transport.forms import read_form
from tinygpt.server.transport.own import connection_of
from tinygpt.server.work.threads import beside

log = logging.getLogger("tinygpt.server.access")
BODY_SECONDS = 30.0  # that a body may take to arrive

Form = TypeVar("Form", bound=Strict)


class Endpoint(Generic[Form]):
    """An ASGI app. `handle(request, form)` answers a body that is a valid `form`."""

    def __init__(self, form: type[Form], handle: Callable[[Request, Form], Awaitable[Response]], state: ServerState):
        self._form, self._handle, self._state = form, handle, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        with suppress(ClientDisconnect):
            body = await self._body(request)
            record_of(request).num_bytes = len(body)
            if self._state.config.enable_log_requests:
                log.info("body", extra={"fields": {"id": record_of(request).id, "body": body.decode(errors="replace")}})
            deque(self._state.unbuilt_models, maxlen=0)
            form = await beside(len(body), read_form, self._form, self._state.limits, body)
            await while_connected(scope, receive, self._answer(request, form, scope, receive, send))

    async def _body(self, request: Request) -> bytes:
        reading = read_body(request, self._state.config.max_body_bytes)
        connection = connection_of(request.scope)
        if connection is not None and connection.has_body:
            return await reading
        return await self._state.unless_stopped(_in_time(reading))

    async def _answer(self, request: Request, form: Form, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._handle(request, form)
        except TinyGPTError as error:
            raise from_engine(error, form) from None
        connection = connection_of(scope)
        if connection is None:
            await response(scope, receive, send)
            return
        connection.keep()  # head and body go as one
        try:
            await response(scope, receive, send)
        finally:
            connection.flush()


async def read_body(request: Request, limit: int) -> bytes:
    """The JSON that a request carries; ApiError if it is none or too much."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Content-Type is {kind!r} and must be application/json.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


async def _in_time(reading: Coroutine[Any, Any, bytes]) -> bytes:
    try:
        return await asyncio.wait_for(reading, BODY_SECONDS)
    except (TimeoutError, asyncio.TimeoutError):
        raise ApiError(
            408, f"the body did not arrive within {BODY_SECONDS:g} s.", headers={"connection": "close"}
        ) from None


def _too_large(limit: int) -> ApiError:
    """The connection stays open, unless the client wants it closed, and uvicorn takes what is left of the body and
    throws it away: a client that sends all before it reads would get a reset in place of the reply. `Connection` bounds
    the time that this may take; `RestOfBody` does the same before a connection closes."""
    return ApiError(413, f"the body is longer than the {limit} bytes that this server reads: send less at a time.")


async def while_connected(scope: Scope, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, and cancel it when the client leaves: `send` never raises."""
    connection = connection_of(scope)
    if connection is None:
        await _while_receiving(receive, work)
        return
    connection.when_gone(asyncio.current_task().cancel)
    try:
        await work
    except asyncio.CancelledError:
        if not connection.is_gone:
            raise
    finally:
        connection.when_gone(None)


async def _while_receiving(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """The same behind any server, of which nothing but `receive` tells that the client leaves."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
    if not working.cancelled():
        working.result()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
