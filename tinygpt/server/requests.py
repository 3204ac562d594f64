"""From the body of an HTTP request to the engine, and back as events; its end when the client leaves."""

import asyncio
import base64
import json
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..engine.engine import RequestFuture
from ..engine.prompts import Prompt
from ..engine.sequence import Progress
from ..errors import RequestError, TinyGPTError
from ..llm import LLM
from ..look.edits import Edit
from ..outputs import RequestOutput, StreamChunk, ThreadFuture
from ..sampling_params import SamplingParams
from .answers import BUG, ApiError, Turns, error_body, event, from_engine
from .client_fields import DROPPING
from .protocol import Array, LookFields
from .replies import Job, PromptChunk

log = logging.getLogger("tinygpt.server")
SSE = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
PING = ": ping\n\n"
LARGE = 8192  # bytes of a body; a thread reads a larger body, which would block the loop for milliseconds
# Bytes of a body. Such bodies are read one after the other, and slowly: json.loads takes up to 0.1 s, with the GIL.
HUGE = 2**16
HUGE_PER_SECOND = 2**26
BODY_SECONDS = 60.0
UNREAD_SECONDS = 5.0
MAX_UNREAD = 10_000  # chunks of a request; with 20 log probabilities each, they take about 20 MB
PING_SECONDS = 15.0  # between comments of a stream, for proxies that close silent connections

GRAMMAR_THREADS = 8  # a process of each may have 256 MiB
LOOK_FIELDS = ("capture", "edits", "extra_args")

Requests = list[tuple[Prompt, SamplingParams]]
Result = TypeVar("Result")
Handler = TypeVar("Handler", bound=Callable)


def route(path: str, *methods: str, **options: Any) -> Callable[[Handler], Handler]:
    """options: FastAPI's."""

    def mark(handler: Handler) -> Handler:
        handler.route = path, methods, options
        return handler

    return mark


def large(request: Request) -> bool:
    return len(request._body) > LARGE


async def read_apart(request: Request, read: Callable[[], Result]) -> Result:
    """Return read(), called in a thread if the body is large."""
    return await asyncio.to_thread(read) if large(request) else read()


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


class ChunkQueue:
    """Chunks on their way from the engine's thread to the loop, which wakes once for each call of the engine."""

    def __init__(self, llm: LLM):
        self.shutdown_error: ApiError | None = None  # which ends all requests
        self._loop = asyncio.get_running_loop()
        self._items: deque[tuple[asyncio.Queue, tuple[int, StreamChunk | None]]] = deque()
        self._room = asyncio.Semaphore(GRAMMAR_THREADS)
        llm.engine.after_step.append(self.flush)

    async def in_grammar_thread(self, call: Callable[[], Result]) -> Result:
        """Return call(), which may take seconds: no thread of other requests and no end of the server waits for it."""
        await self._room.acquire()
        future = ThreadFuture()
        free = partial(self._loop.call_soon_threadsafe, self._room.release)
        future.add_done_callback(lambda _: self._loop.is_closed() or free())
        threading.Thread(target=future.settle, args=(call,), daemon=True).start()
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future  # whose error has this frame

    def post(self, queue: asyncio.Queue, item: tuple[int, StreamChunk | None]) -> None:
        self._items.append((queue, item))

    def flush(self) -> None:
        if self._items and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._items:
            queue, item = self._items.popleft()
            queue.put_nowait(item)


class RunningRequest:
    """Requests of one or several prompts, which end together. The owner calls `cancel` at the end."""

    def __init__(self, llm: LLM, outbox: ChunkQueue):
        self._llm = llm
        self._outbox = outbox
        # The index of a prompt and a chunk, or None at the prompt's end; None is a ping.
        self._queue: asyncio.Queue[tuple[int, StreamChunk | None] | None] = asyncio.Queue()
        self._times: dict[tuple[int, int], list[float]] = {}  # (prompt, sample) -> when each token came
        self.futures: list[RequestFuture] = []
        self._is_cancelled = False
        self._num_posted = 0  # by the thread of the engine
        self._num_taken = 0  # by the loop
        self._taken_at = time.perf_counter()
        self._is_slow = False

    async def submit(self, requests: Requests, stream: bool, in_thread: bool) -> None:
        """Run all requests, or none. Raises as LLM.submit does."""
        submit = partial(self._submit, requests, stream)
        try:
            if any(params.guidance is not None for _, params in requests):
                await self._outbox.in_grammar_thread(submit)
            # The first request with DRY decodes all tokens.
            elif in_thread or any(params.dry_multiplier for _, params in requests):
                await asyncio.to_thread(submit)
            else:
                submit()
        except BaseException:
            self.end()
            raise

    async def outputs(self) -> list[RequestOutput]:
        try:
            return await asyncio.gather(*map(asyncio.wrap_future, self.futures))
        except asyncio.CancelledError:
            if self._is_slow:
                message = f"{MAX_UNREAD} tokens of the stream were not read: read it faster."
                raise ApiError(400, message) from None
            raise self._outbox.shutdown_error or asyncio.CancelledError from None

    async def chunks(self) -> AsyncIterator[list[PromptChunk] | None]:
        """Yield all chunks that have come, until the last request has ended; None for a ping."""
        num_left = len(self.futures)
        ping_later = partial(
            asyncio.get_running_loop().call_later, PING_SECONDS, self._queue.put_nowait, None
        )
        pinging = ping_later()
        try:
            while num_left:
                items = [await self._queue.get()]
                while not self._queue.empty():
                    items.append(self._queue.get_nowait())
                if None in items:
                    pinging = ping_later()
                    yield None
                    items.remove(None)
                chunks = [item for item in items if item[1] is not None]
                num_left -= len(items) - len(chunks)
                self._num_taken += len(chunks)
                self._taken_at = time.perf_counter()
                yield chunks
        finally:
            pinging.cancel()

    def cancel(self) -> None:
        self._is_cancelled = True
        for future in self.futures:
            future.cancel()

    def end(self) -> list[tuple[Progress, list[str]]]:
        """Cancel the requests. Return the progress of each, and its finish reasons: "abort" if it is not finished."""
        self.cancel()
        found = []
        for future in self.futures:
            progress = future.request.progress()
            reasons = ["abort"]
            if future.done() and not future.cancelled() and not future.exception():
                samples = future.result().outputs
                progress = replace(progress, num_new_tokens=sum(len(sample.token_ids) for sample in samples))
                reasons = [sample.finish_reason for sample in samples]
            found.append((progress, reasons))
        self.futures.clear()  # of which each refers to this object: memory is free before a garbage collection
        return found

    def token_gaps(self) -> Iterator[float]:
        """Yield the seconds between tokens of each streamed sample."""
        for times in list(self._times.values()):
            yield from (after - before for before, after in pairwise(times))

    def _submit(self, requests: Requests, stream: bool) -> None:
        futures = []
        for i, request in enumerate(requests):
            on_chunk = partial(self._post, i) if stream else None
            futures.append(RequestFuture(self._llm._single_request(*request, on_chunk)))
        self._llm.engine.submit_queued(futures)
        self.futures = futures
        for i, future in enumerate(futures if stream else ()):
            future.add_done_callback(partial(self._post_end, i))
        if self._is_cancelled:  # meanwhile, in the loop
            self.end()

    def _post(self, i: int, chunk: StreamChunk) -> None:
        """Called by the engine's thread."""
        self._num_posted += 1
        now = time.perf_counter()
        if chunk.token_id is not None:
            self._times.setdefault((i, chunk.index), []).append(now)
        num_unread = self._num_posted - self._num_taken
        is_slow = num_unread > MAX_UNREAD and now - self._taken_at > UNREAD_SECONDS
        if is_slow and not self._is_slow:
            self._is_slow = True
            self.cancel()
        self._outbox.post(self._queue, (i, chunk))

    def _post_end(self, i: int, future: RequestFuture) -> None:
        """Called by any thread: a request can also end between two steps."""
        self._outbox.post(self._queue, (i, None))
        self._outbox.flush()


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
                    turn = request.state.reading.enter_async_context(api.huge)
                    await while_connected(request.receive, turn)
                    api.check_open()
                    await asyncio.sleep(len(body) / HUGE_PER_SECOND)
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
            request.state.reading.enter_context(api.holding(len(body)))
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

    def __init__(self, job: Job, work: RunningRequest, turns: Turns, end: Callable[[], None]):
        """turns: writes events. end: called once, however the reply ends, also if it never begins."""
        super().__init__(self._events(job, work, turns), headers=SSE)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await while_connected(receive, self.stream_response(send))
        finally:
            self._end()

    async def _events(self, job: Job, work: RunningRequest, turns: Turns) -> AsyncIterator[str | bytes]:
        last = job.done
        try:
            yield job.begin()
            async for chunks in work.chunks():
                async for part in turns([PING] if chunks is None else job.write(chunks)):
                    yield part
            async for part in turns(job.end(await work.outputs())):
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
