"""What stands before a route: bounds of a connection, its keys and hosts, a body, and refusals of a wrong one.

Connection is HTTP/1.1 of uvicorn and httptools, Gate a middleware, JsonRoute FastAPI's route.
"""

import asyncio
import json
import logging
import re
import reprlib
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import httptools
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ..aliases import OURS
from ..errors import RequestError, suggest
from ..fields import MAX_COUNT
from .api import FILLING, Api
from .chats import ChatRequest, ResponsesRequest
from .client_fields import DROPPING, hint_of
from .protocol import SamplingFields, Strict
from .refusals import ApiError, respond
from .turns import HUGE, read_huge, while_connected

# Monitors and browsers read these without a key; they hold no text of a client.
OPEN_PATHS = frozenset({"/", "/health", "/metrics", "/version", "/openapi.json"})
CLIENT_LEFT = 499  # nginx's status
BODY_SECONDS = 60.0
REPLY_PIECE_BYTES = 2**16
MAX_SHOWN = 100  # characters of a field name that the client made up
_ID = re.compile(r"[\x21-\x7e]{1,200}")
access_log = logging.getLogger("tinygpt.server.access")
HEAD_BYTES = 2**16  # of a request's path, headers and trailers
NUM_HEADERS = 100  # trailers included
HEAD_SECONDS = 30.0
NUM_PIPELINED = 16  # requests that wait for the reply to another
NUM_PIECES = 10_000  # of a body, unless they have PIECE_BYTES on average: each takes 2 us of the event loop
PIECE_BYTES = 16
LARGE_HEAD = f"path and headers have at most {HEAD_BYTES} bytes, and there are at most {NUM_HEADERS} headers."


class Connection(HttpToolsProtocol):
    """A connection that ends if its client sends more than a bound; httptools has none."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._refusal: ApiError | None = None
        self._begin_head()
        self._head_timer = self._timer()

    def _begin_head(self) -> None:
        self._num_unfinished = 0  # bytes since a call of the parser: it keeps an unfinished header
        self._is_in_head = True  # not in a body or its trailers
        self._num_head_bytes = 0
        self._num_headers = 0
        self._num_pieces = 0
        self._num_body_bytes = 0

    def _timer(self) -> asyncio.TimerHandle:
        return self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        self._unset_keepalive_if_required()  # uvicorn forgets it after a reset
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_unfinished += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        if self._num_unfinished > HEAD_BYTES and not self.transport.is_closing():
            self._refusal = ApiError(431, LARGE_HEAD)
            self.send_400_response("")

    def _parse(self, data: bytes) -> None:
        """Parse data. A head that offers an upgrade, after which httptools sees no body, comes again without it."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as ended:
            first = b"%s %s HTTP/%s" % (
                self.parser.get_method(),
                self.url,
                self.parser.get_http_version().encode(),
            )
            lines = [b"%s: %s" % each for each in self.headers if each[0] != b"upgrade"]
            # After "Connection: close" the other one reads no more.
            self.parser = httptools.HttpRequestParser(self)
            self._parse(b"\r\n".join([first, *lines, b"\r\n"]) + data[ended.args[0] :])

    def send_400_response(self, msg: str) -> None:
        """Send the refusal, unless a reply is under way, and end the connection."""
        if self.cycle is None or self.cycle.response_complete:
            reply = respond(self._refusal or ApiError(400, "this is not HTTP/1.1."))
            headers = [*reply.raw_headers, (b"connection", b"close")]
            lines = [name + b": " + value + b"\r\n" for name, value in headers]
            self.transport.write(b"".join([STATUS_LINE[reply.status_code], *lines, b"\r\n", reply.body]))
        self.pipeline.clear()
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count_head(len(name) + len(value))
        if self._is_in_head:
            super().on_header(name, value)

    def _count_head(self, num_bytes: int) -> None:
        self._num_unfinished = 0
        self._num_head_bytes += num_bytes
        self._refuse_if(self._num_head_bytes > HEAD_BYTES or self._num_headers > NUM_HEADERS, 431, LARGE_HEAD)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self._refuse_if(self.parser.get_method() == b"CONNECT", 400, "this is no proxy.")
            return
        self._head_timer.cancel()
        self._is_in_head = False
        super().on_headers_complete()
        too_many = len(self.pipeline) > NUM_PIPELINED
        self._refuse_if(too_many, 400, f"at most {NUM_PIPELINED} requests may wait for a reply.")

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unfinished = 0
        self._num_pieces += 1
        self._num_body_bytes += len(body)
        too_many = self._num_pieces > max(NUM_PIECES, self._num_body_bytes // PIECE_BYTES)
        self._refuse_if(
            too_many, 400, f"a body has at most {NUM_PIECES} chunks of less than {PIECE_BYTES} bytes."
        )
        super().on_body(body)

    def _refuse_if(self, is_true: bool, status: int, message: str) -> None:
        """Raise if a bound is passed: the parser ends, and data_received sends the refusal."""
        if is_true:
            self._refusal = ApiError(status, message)
            raise httptools.HttpParserError

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last and not self.transport.is_closing():
            self._head_timer.cancel()
            self._head_timer = self._timer()


class Gate:
    """The checks of each request before its route, its id, and its line in the log."""

    def __init__(self, app: ASGIApp, api: Api, paths: frozenset[str]):
        """paths: others count as "other", to bound the labels."""
        self._app = app
        self._api = api
        self._hosts = api.config.allowed_hosts
        self._paths = paths
        self._count = api.metrics.count_http
        self._keys = [key.encode() for key in api.config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        begun = time.perf_counter()
        told = 0
        status = CLIENT_LEFT
        request_id = headers.get("x-request-id", "")
        if not _ID.fullmatch(request_id):
            request_id = secrets.token_hex(16)
        notes: dict[str, Any] = {}  # of routes, for the log line
        scope["state"] = {**scope.get("state", {}), "notes": notes, "id": request_id}

        async def noted(message: Message) -> None:
            nonlocal told, status
            if message["type"] == "http.response.start":
                told = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            elif not message.get("more_body", False):
                status = told  # the reply is whole
            await self._send(message, send)

        try:
            refusal = self._refusal(scope["path"], headers)
            await (self._app if refusal is None else respond(refusal))(scope, receive, noted)
        except Exception:  # a bug: the outermost middleware replies with status 500
            status = 500
            raise
        finally:
            self._count(scope["path"] if scope["path"] in self._paths else "other", status)
            path = ascii(scope["path"])[1:-1]  # it may hold control characters
            fields = {"id": request_id, "method": scope["method"], "path": path, "status": status, **notes}
            fields["seconds"] = round(time.perf_counter() - begun, 6)
            access_log.info("request", extra={"fields": fields})

    async def _send(self, message: Message, send: Send) -> None:
        """Send a body as fast as the client reads it. Its bytes count as held until then."""
        body = message.get("body", b"")
        pieces = [slice(start, start + REPLY_PIECE_BYTES) for start in range(0, len(body), REPLY_PIECE_BYTES)]
        self._api.turns.held_bytes += len(body)
        try:
            for piece in pieces[:-1]:
                await send({**message, "body": body[piece], "more_body": True})
            await send({**message, "body": body[pieces[-1]]} if pieces else message)
        finally:
            self._api.turns.held_bytes -= len(body)

    def _refusal(self, path: str, headers: Mapping[str, str]) -> ApiError | None:
        host = headers.get("host", "").lower()
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if self._hosts is not None and name not in self._hosts:
            listed = ", ".join(sorted(self._hosts))
            return ApiError(403, f"the Host header must be one of {listed}.", code="host_not_allowed")
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # In constant time.
        matches = [secrets.compare_digest(key.encode("latin-1"), known) for known in self._keys]
        if self._keys and path not in OPEN_PATHS and not (scheme.lower() == "bearer" and any(matches)):
            message = "the API key is missing or wrong: send the header Authorization: Bearer KEY."
            return ApiError(401, message, code="invalid_api_key", **{"www-authenticate": "Bearer"})
        return None if path in OPEN_PATHS else self._api.turns.memory_error()


class JsonRoute(APIRoute):
    """A route whose body must be JSON of a limited size."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            if request.method != "POST":
                return await handle(request)
            api = request.app.state.api
            async with AsyncExitStack() as request.state.reading:
                try:
                    body = await asyncio.wait_for(_read_body(request), BODY_SECONDS)
                except asyncio.TimeoutError:
                    raise ApiError(408, f"the body took more than {BODY_SECONDS:g} seconds.") from None
                if len(body) > HUGE:
                    turn = request.state.reading.enter_async_context(api.turns.huge)
                    await while_connected(request.receive, turn)
                    api.check_open()
                read = json.loads
                if api.config.unknown_fields == "ignore":
                    read = partial(_known_fields, self.body_field.field_info.annotation)
                return await handle(JsonRequest(request, body, read))

        return answer


class JsonRequest(Request):
    """A request whose body is read already; FastAPI calls `json`, and explains its JSONDecodeError."""

    def __init__(self, request: Request, body: bytes, read: Callable[[bytes], Any]):
        super().__init__(request.scope, request.receive)
        self._body = body
        self._read = partial(read, body)

    async def json(self) -> Any:
        return await read_huge(self._read) if len(self._body) > HUGE else self._read()


async def _read_body(request: Request) -> bytes:
    api = request.app.state.api
    config = api.config
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a web page of another site cannot send this type without permission
        raise ApiError(415, f"Content-Type is {kind!r} and must be application/json.")
    declared = request.headers.get("content-length", "")
    limit = config.max_body_bytes
    body = bytearray()
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    num_held = 0
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise _too_large(limit)
        if len(body) > num_held:  # an object for each of a million packets would take more than the body
            request.state.reading.enter_context(api.turns.holding(len(body)))
            num_held += len(body)
    if config.enable_log_requests:
        fields = {"id": request.state.id, "body": body.decode(errors="replace")}
        access_log.info("body", extra={"fields": fields})
    return bytes(body)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than the {limit} bytes that this server reads.")


def _known_fields(form: type[Strict], body: bytes) -> dict[str, Any]:
    """Return the body's value without fields that are unknown or lacking. Raise ApiError for other errors."""
    value = json.loads(body)
    try:
        known = form.model_validate(value, extra="ignore", context=DROPPING)
    except ValidationError as error:
        raise from_validation(_of_body(error, value), form) from None
    return known.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _of_body(error: ValidationError, body: Any) -> RequestValidationError:
    errors = error.errors(include_url=False)
    return RequestValidationError([{**wrong, "loc": ("body", *wrong["loc"])} for wrong in errors], body=body)


def check_body(form: type[Strict], body: dict[str, Any]) -> None:
    """Raise RequestError for a body of another form, or with a sampling field out of its bounds."""
    try:
        checked = form.model_validate(body)
        if isinstance(checked, SamplingFields):
            looks = checked.look_params(False, {})  # a batch has no --look
            checked.sampling_params(lambda text: [0], max_tokens=_most_tokens(checked), **looks)
    except ValidationError as error:
        raise RequestError(from_validation(_of_body(error, body), form).detail) from None
    except ApiError as error:
        raise RequestError(error.detail) from None
    except RequestError as error:
        name = checked.name_of(error.field) if error.field else None
        raise (error.named(name) if name else error) from None


def _most_tokens(form: Any) -> int | None:
    """Return max_tokens, of a body that fills the context any number; None for the default."""
    asked = getattr(form, "max_completion_tokens", None) or form.max_tokens
    is_chat = isinstance(form, ChatRequest | ResponsesRequest)
    return MAX_COUNT if asked == FILLING or (asked is None and is_chat) else asked


def from_validation(error: RequestValidationError, form: type[Strict]) -> ApiError:
    """Return a refusal with the most specific error, a missing field last."""
    errors = [(_path(wrong["loc"][1:], error.body), wrong) for wrong in error.errors()]
    # Of a list's types, the one that fits the most elements.
    path, first = max(
        errors, key=lambda pair: (len(pair[0]), _positions(pair[0]), pair[1]["type"] != "missing")
    )
    if first["type"] == "json_invalid" or not path:
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"the body must be a JSON object: {reason}.")
    param, name = path[0], ".".join(path)
    if first["type"] == "missing":
        lacking = "" if first["loc"][-1] == path[-1] else f".{first['loc'][-1]}"
        return ApiError(400, f"{name}{lacking} is required.", param)
    if first["type"] != "extra_forbidden":
        first_reason, *others = dict.fromkeys(
            _reason(wrong) for other, wrong in errors if other == path
        )  # of a union
        reasons = ", or ".join(
            [first_reason, *(reason.removeprefix("Input should be ") for reason in others)]
        )
        return ApiError(400, f"{name} is {reprlib.repr(first['input'])}: {reasons}.", param)
    known = form.fields_by_name() if len(path) == 1 else {}
    if known and (ours := OURS.get(param, param)) in form.model_fields:
        ours = form.model_fields[ours].alias or ours
        return ApiError(400, f"{name} and {ours} name one thing: give one of them.", param)
    if known and (hint := hint_of(param)):
        return ApiError(400, f"{name} is {reprlib.repr(first['input'])}: {hint}.", param)
    return ApiError(400, f"unrecognized request argument: {name}{suggest(param, known) or '.'}", param)


def _reason(error: dict[str, Any]) -> str:
    return error["msg"].removeprefix("Value error, ")


def _positions(path: list[str]) -> list[int]:
    return [int(part) for part in path if part.isdecimal()]


def _path(place: tuple[str | int, ...], value: Any) -> list[str]:
    """Return the names and positions in the body: pydantic also lists the types of a union that it tried."""
    path = []
    for part in place:
        is_there = (
            part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        )
        if is_there or part == place[0]:
            path.append(text if len(text := str(part)) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")
            value = value[part] if is_there else None
    return path
