"""AsyncLLM: an LLM for asyncio, and AsyncRequests, which a server shares with it. No step blocks the event loop."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from .engine.prompts import PromptType, params_list, params_or_fields
from .errors import OfOneProcess
from .outputs import OnChunk, RequestOutput, StreamChunk, ThreadFuture
from .sampling_params import SamplingParams

if TYPE_CHECKING:  # a RemoteLLM imports nothing that computes
    from typing_extensions import Unpack

    from .llm import LLM
    from .remote import RemoteLLM
    from .sampling_keywords import SamplingKeywords

IndexedChunk = tuple[int, StreamChunk]  # with the index of its request
ToCall = Callable[[int], OnChunk | None]  # gives the on_chunk of the request with this index
Submit = Callable[[ToCall], list[ThreadFuture]]
Apart = Callable[[Callable[[], None]], Awaitable[None]]  # runs a call in a thread


class Outbox:
    """Items on their way to queues of one event loop, which wakes once for each call of the engine."""

    def __init__(self, calls: list[Callable[[], None]] | None):
        """calls: the engine's after each of its calls; None: of a RemoteLLM, whose chunks come one by one."""
        self._loop = asyncio.get_running_loop()
        self._calls = calls
        self._items: deque[tuple[asyncio.Queue, Any]] = deque()

    @classmethod
    def of(cls, llm: "LLM | RemoteLLM") -> "Outbox":
        """Return the LLM's outbox for the running loop."""
        engine = getattr(llm, "engine", None)
        if engine is None:
            return cls(None)
        loop = asyncio.get_running_loop()
        for call in engine.after_step:
            if isinstance(call, Outbox) and call._loop is loop:
                return call
        outbox = cls(engine.after_step)
        engine.after_step.append(outbox)
        return outbox

    def __call__(self) -> None:
        """Wake the loop for all items, or leave the engine if the loop has ended."""
        if self._calls is not None and self._loop.is_closed():
            self._calls.remove(self)
        elif self._items:
            self.flush()

    def post(self, queue: asyncio.Queue, item: Any) -> None:
        self._items.append((queue, item))
        if self._calls is None:
            self.flush()

    def flush(self) -> None:
        with suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._items:
            queue, item = self._items.popleft()
            queue.put_nowait(item)


class AsyncRequests:
    """Requests that end together, awaited in one event loop. The owner calls `end`. stream: they give chunks."""

    def __init__(self, outbox: Outbox, stream: bool):
        self.futures: list[ThreadFuture] = []
        self._outbox = outbox
        self._streams = stream
        # An index and a chunk, or None at the request's end; None is a ping.
        self._queue: asyncio.Queue[tuple[int, StreamChunk | None] | None] = asyncio.Queue()
        self._is_cancelled = False
        self._reason: Exception | None = None  # for a cancellation

    async def begin(self, submit: Submit, apart: Apart | None = None) -> None:
        """Keep the futures of `submit`, which runs in the loop, or by `apart` in a thread. Raise its errors."""
        begin = partial(self._begin, submit)
        try:
            if apart is None:
                begin()
            else:
                await apart(begin)
        except BaseException:
            self.end()
            raise

    async def outputs(self) -> list[RequestOutput]:
        """Raise the reason of a cancellation."""
        try:
            return await asyncio.gather(*map(asyncio.wrap_future, self.futures))
        except asyncio.CancelledError:
            raise self._reason or asyncio.CancelledError from None

    async def chunks(self, ping_seconds: float | None = None) -> AsyncIterator[list[IndexedChunk] | None]:
        """Yield all chunks that have come, until the last request has ended; None for a ping."""
        num_left = len(self.futures)
        loop = asyncio.get_running_loop()

        def ping_later() -> asyncio.TimerHandle:
            return loop.call_later(ping_seconds, self._queue.put_nowait, None)

        pinging = None if ping_seconds is None else ping_later()
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
                yield chunks
        finally:
            if pinging is not None:
                pinging.cancel()

    def cancel(self, reason: Exception | None = None) -> None:
        self._is_cancelled = True
        self._reason = self._reason or reason
        for future in self.futures:
            future.cancel()

    def end(self) -> None:
        """Cancel the requests, and forget them: each refers to this object, which is free before a collection."""
        self.cancel()
        self.futures.clear()
        self._reason = None

    def post(self, i: int, chunk: StreamChunk) -> None:
        """Called by the thread of the engine."""
        self._outbox.post(self._queue, (i, chunk))

    def _begin(self, submit: Submit) -> None:
        self.futures = submit(self._on_chunk)
        for i, future in enumerate(self.futures if self._streams else ()):
            future.add_done_callback(partial(self._post_end, i))
        if self._is_cancelled:  # meanwhile, in the loop
            self.end()

    def _on_chunk(self, i: int) -> OnChunk | None:
        return partial(self.post, i) if self._streams else None

    def _post_end(self, i: int, future: ThreadFuture) -> None:
        """Called by any thread: a request can also end between two steps."""
        self._outbox.post(self._queue, (i, None))
        self._outbox.flush()


class AsyncLLM(OfOneProcess):
    """An LLM for tasks of any event loop. A cancelled task frees its request's memory within a step.

    llm: an LLM or RemoteLLM, which others may use, too; None: load an LLM with `arguments`, and close it with this.
    """

    def __init__(self, llm: "LLM | RemoteLLM | None" = None, **arguments: Any):
        self._is_owner = llm is None
        if llm is None:
            from .llm import LLM

            llm = LLM(**arguments)
        self.llm = llm

    async def generate(
        self, prompt: PromptType, params: SamplingParams | None = None, **fields: "Unpack[SamplingKeywords]"
    ) -> RequestOutput:
        """Continue one prompt. Raise LLM.submit's errors."""
        requests = await self._begin(prompt, params, fields, stream=False)
        try:
            [output] = await requests.outputs()
            return output
        finally:
            requests.end()

    async def stream(
        self, prompt: PromptType, params: SamplingParams | None = None, **fields: "Unpack[SamplingKeywords]"
    ) -> AsyncIterator[StreamChunk]:
        """Continue one prompt, token by token. Raise LLM.submit's errors with the first chunk."""
        requests = await self._begin(prompt, params, fields, stream=True)
        try:
            async for chunks in requests.chunks():
                for _, chunk in chunks or ():
                    yield chunk
            await requests.outputs()
        finally:
            requests.end()

    async def _begin(
        self, prompt: PromptType, params: SamplingParams | None, fields: Any, stream: bool
    ) -> AsyncRequests:
        [checked] = params_list(params_or_fields(params, fields), 1)
        # A grammar can take seconds, and the first request with DRY decodes all tokens.
        is_slow = checked.guidance is not None or checked.dry_multiplier > 0

        requests = AsyncRequests(Outbox.of(self.llm), stream)
        await requests.begin(
            lambda on_chunk: [self.llm.submit(prompt, checked, on_chunk(0))],
            asyncio.to_thread if is_slow else None,
        )
        return requests

    async def close(self) -> None:
        """Close the LLM if this object has made it."""
        if self._is_owner:
            await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *exception) -> None:
        await self.close()
