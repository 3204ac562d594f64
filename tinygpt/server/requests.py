"""From the body of an HTTP request to the engine, and back as events; its end when the client leaves."""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

import numpy as np
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..errors import RequestError, TinyGPTError
from ..look.edits import Edit
from .client_fields import DROPPING
from .monitoring import RunningRequest
from .protocol import Array, LookFields
from .refusals import BUG, ApiError, error_body, from_engine
from .replies import Job, event
from .turns import HUGE, Write

log = logging.getLogger("tinygpt.server")
SSE = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
PING = ": ping\n\n"
BODY_SECONDS = 60.0
PING_SECONDS = 15.0  # between comments of a stream, for proxies that close silent connections
LOOK_FIELDS = ("capture", "edits", "extra_args")

Result = TypeVar("Result")
Handler = TypeVar("Handler", bound=Callable)


def route(path: str, *methods: str, **options: Any) -> Callable[[Handler], Handler]:
    """options: FastAPI's."""

    def mark(handler: Handler) -> Handler:
        handler.route = path, methods, options
        return handler

    return mark


def look_params(form: LookFields, is_allowed: bool, vectors: Mapping[str, Any]) -> dict[str, Any]:
    """Return `capture` and `edits` for SamplingParams. vectors: ControlVector by name. Raise ApiError, RequestError."""
    if not is_allowed and (given := [name for name in LOOK_FIELDS if getattr(form, name) is not None]):
        raise ApiError(400, f"{given[0]} needs a server that was started with --look.", given[0])
    edits = [_edit(f"edits[{i}]", each) for i, each in enumerate(form.edits or ())]
    for name, strength in (form.steer or {}).items():
        if name not in vectors:
            known = f"it has {', '.join(vectors)}" if vectors else "start it with --control-vector NAME=FILE"
            raise ApiError(400, f"this server has no control vector {name!r}: {known}.", "steer")
        edits += vectors[name].edits(strength)
    names = [form.capture] if isinstance(form.capture, str) else list(form.capture or ())
    if form.extra_args is not None:
        names += [f"blocks.{layer}.hook_resid_post" for layer in form.extra_args.output_residual_stream]
    return {"capture": names or None, "edits": edits or None}


def _edit(field: str, form: Any) -> Edit:
    values = {name: getattr(form, name) for name in form.model_fields_set}
    try:
        given = [name for name in ("keep", "value", "project_out") if values.get(name) is not None]
        return Edit(**values | {name: _array(values[name]) for name in given})
    except RequestError as error:
        raise error.named(f"{field}.{error.field}") from None
    except (ValueError, TypeError) as error:
        raise RequestError(f"has an array that cannot be read: {error}.", field) from None


def _array(given: Any) -> np.ndarray:
    """Raise ValueError or TypeError."""
    if isinstance(given, Array):
        data = base64.b64decode(given.data, validate=True)
        array = np.frombuffer(data, np.dtype(given.dtype).newbyteorder("<")).reshape(given.shape)
    else:
        array = np.array(given, np.float32)
    if not np.isfinite(array).all():
        raise ValueError("its numbers must be finite")
    return array


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
                    turn = request.state.reading.enter_async_context(api.turns.huge(len(body)))
                    await while_connected(request.receive, turn)
                    api.check_open()
                if api.config.ignores_unknown_fields:
                    body = _known_fields(self.body_field.field_info.annotation, body)
                request._body = body  # FastAPI reads it from here
                return await handle(request)

        return answer


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
        logging.getLogger("tinygpt.server.access").info("body", extra={"fields": fields})
    return bytes(body)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than the {limit} bytes that this server reads.")


def _known_fields(form: type[BaseModel], body: bytes) -> bytes:
    """Return the body without fields that are unknown or lacking. Raise RequestValidationError for other errors."""
    try:
        known = form.model_validate_json(body, extra="ignore", context=DROPPING)
        return known.model_dump_json(by_alias=True, exclude_unset=True).encode()
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        if found[0]["type"] == "json_invalid":
            return body
        raise RequestValidationError(found, body=json.loads(body)) from None


class EventStream(StreamingResponse):
    """A reply of server-sent events, which ends its work when the client leaves. An error is the last event."""

    def __init__(self, job: Job, work: RunningRequest, write: Write, end: Callable[[], None]):
        """end: called once, however the reply ends, also if it never begins."""
        super().__init__(self._events(job, work, write), headers=SSE)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await while_connected(receive, self.stream_response(send))
        finally:
            self._end()

    async def _events(self, job: Job, work: RunningRequest, write: Write) -> AsyncIterator[str | bytes]:
        last = job.done
        try:
            yield job.begin()
            async for chunks in work.chunks(PING_SECONDS):
                async for part in write([PING] if chunks is None else job.write(chunks)):
                    yield part
            async for part in write(job.end(await work.outputs())):
                yield part
        except ApiError as error:
            last = event(error_body(error)) + job.done
        except TinyGPTError as error:
            last = event(error_body(from_engine(error))) + job.done
        except Exception:
            log.exception("a bug ended a stream")
            last = event(error_body(BUG)) + job.done
        yield last


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of the work, or cancel it and raise ClientDisconnect when the client leaves."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(until_gone())
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
        del working  # whose error has this frame
