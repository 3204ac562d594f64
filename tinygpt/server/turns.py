"""Turns: how the event loop stays free for other clients, and what slow work may hold meanwhile.

| slow | takes | runs | holds |
|---|---|---|---|
| JSON of a body above HUGE | 0.1 s, with the GIL | in a thread, after others: `read_huge` | its turn |
| texts of a body above LARGE | milliseconds | in a thread: `read_apart` | nothing |
| a chat template | milliseconds, or a loop's | in a thread: `asyncio.to_thread` | nothing |
| a grammar | seconds | in its own thread: `in_grammar_thread` | a place of GRAMMAR_THREADS |
| the first request with DRY | 0.1 s | in a thread: `thread_for` | nothing |
| JSON of a reply | seconds, with the GIL | in the loop, SLICE_SECONDS each: `in_slices` | nothing |
| arrays of `capture` | seconds, as they are written | in a thread: `in_one_thread` | its turn |

All bodies, and replies until clients have read them, hold bytes of MAX_HELD: `holding`.
"""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import GeneratorType
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive

from ..async_llm import Apart
from ..outputs import ThreadFuture
from ..sampling_params import SamplingParams
from .refusals import RETRY, ApiError, to_json

LARGE = 8192  # bytes of a body
HUGE = 2**16
GRAMMAR_THREADS = 8  # a process of each may have 256 MiB
MAX_HELD = 2**30  # bytes
SLICE_SECONDS = 0.002
BLOCK = 32  # elements that are written at once

Result = TypeVar("Result")
Write = Callable[[Iterable[str]], AsyncIterator[bytes]]  # writes the parts of a reply


class Turns:
    """What the requests of one server take turns at. shutdown_error: ends all of them."""

    def __init__(self):
        self.shutdown_error: ApiError | None = None
        self.held_bytes = 0
        self.huge = asyncio.Lock()
        self._arrays = asyncio.Lock()
        self._grammar_places = asyncio.Semaphore(GRAMMAR_THREADS)

    def memory_error(self, size: int = 0) -> ApiError | None:
        """Return the refusal of `size` bytes more. A body or reply alone may have any size."""
        if not self.held_bytes or self.held_bytes + size <= MAX_HELD:
            return None
        told = f"the replies to other requests, made and not read yet, take {MAX_HELD >> 20} MiB"
        return ApiError(429, f"{told}: ask again later.", code="memory_full", **RETRY)

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Count bytes of a body or of a reply's values as held. Raise ApiError if others hold too many."""
        if error := self.memory_error(size):
            raise error
        self.held_bytes += size
        try:
            yield
        finally:
            self.held_bytes -= size

    def thread_for(self, request: Request, params: SamplingParams | None) -> Apart | None:
        """Return what runs the checks of the engine's requests, or None if the loop may."""
        if params is not None and params.guidance is not None:
            return self.in_grammar_thread
        is_slow = is_large(request) or (params is not None and params.dry_multiplier > 0)
        return asyncio.to_thread if is_slow else None

    async def in_grammar_thread(self, call: Callable[[], Result]) -> Result:
        """Return call(). No thread of other requests and no end of the server waits for it."""
        await self._grammar_places.acquire()
        loop = asyncio.get_running_loop()
        future = ThreadFuture()
        free = partial(loop.call_soon_threadsafe, self._grammar_places.release)
        future.add_done_callback(lambda _: loop.is_closed() or free())
        threading.Thread(target=future.settle, args=(call,), daemon=True).start()
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future  # whose error has this frame

    async def in_one_thread(self, parts: Iterable[str]) -> AsyncIterator[bytes]:
        """Yield the parts as one."""
        async with self._arrays:
            written = await asyncio.to_thread(lambda: "".join(parts).encode())
        yield written  # with no turn held: a client may read for long


def is_large(request: Request) -> bool:
    return len(request._body) > LARGE


async def read_apart(request: Request, read: Callable[[], Result]) -> Result:
    """Return read(), called in a thread if the body is large."""
    return await asyncio.to_thread(read) if is_large(request) else read()


async def read_huge(read: Callable[[], Result]) -> Result:
    """Return read(), called in a thread, and then leave the loop alone for as long as that took."""
    begun = time.perf_counter()
    try:
        return await asyncio.to_thread(_without_collections, read)
    finally:
        await asyncio.sleep(time.perf_counter() - begun)


def _without_collections(read: Callable[[], Result]) -> Result:
    was_enabled = gc.isenabled()
    gc.disable()  # of a body of a million lists, collections take nine tenths of the time
    try:
        return read()
    finally:
        if was_enabled:
            gc.enable()


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


async def in_slices(parts: Iterable[str]) -> AsyncIterator[bytes]:
    """Yield the parts together, and let the loop and the engine have a turn every SLICE_SECONDS."""
    made = []
    end = time.perf_counter() + SLICE_SECONDS
    for part in parts:
        made.append(part)
        if time.perf_counter() > end:
            yield "".join(made).encode()
            await asyncio.sleep(0)
            made = []
            end = time.perf_counter() + SLICE_SECONDS
    if made:
        yield "".join(made).encode()


async def whole(parts: Iterable[str], write: Write | None = None) -> memoryview:
    """Return the parts as one, which are in memory once."""
    content = bytearray()
    async for part in (write or in_slices)(parts):
        content += part
    return memoryview(content)


async def json_reply(value: dict[str, Any], write: Write | None = None) -> Response:
    return Response(await whole(json_parts(value), write), media_type="application/json")


def json_parts(value: Any) -> Iterator[str]:
    """Yield the JSON of a value; one call would hold the GIL for seconds. A generator is a list."""
    if isinstance(value, GeneratorType):
        separator = "["
        for element in value:
            yield separator
            yield from json_parts(element)
            separator = ","
        yield "[]" if separator == "[" else "]"
    elif isinstance(value, list) and len(value) > BLOCK:
        for start in range(0, len(value), BLOCK):
            yield f"{',' if start else '['}{to_json(value[start : start + BLOCK])[1:-1]}"
        yield "]"
    elif isinstance(value, dict) and any(
        isinstance(member, list | dict | GeneratorType) for member in value.values()
    ):
        separator = "{"
        for name, member in value.items():
            yield f"{separator}{to_json(name)}:"
            yield from json_parts(member)
            separator = ","
        yield "}"
    else:
        yield to_json(value)
