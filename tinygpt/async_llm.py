"""AsyncLLM: an LLM for asyncio. No step blocks the event loop."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from .engine.prompts import PromptType
from .fields import own_names
from .outputs import RequestOutput, StreamChunk
from .sampling_params import GUIDED_FIELDS, SAMPLING_FIELDS, SamplingParams

if TYPE_CHECKING:  # a RemoteLLM imports nothing that computes
    from typing_extensions import Unpack

    from .llm import LLM
    from .remote import RemoteLLM
    from .sampling_keywords import SamplingKeywords


class AsyncLLM:
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
        return await asyncio.wrap_future(await self._submit(prompt, params, fields))

    async def stream(
        self, prompt: PromptType, params: SamplingParams | None = None, **fields: "Unpack[SamplingKeywords]"
    ) -> AsyncIterator[StreamChunk]:
        """Continue one prompt, token by token. Raise LLM.submit's errors with the first chunk."""
        chunks: asyncio.Queue[StreamChunk | None] = asyncio.Queue()
        post = partial(asyncio.get_running_loop().call_soon_threadsafe, chunks.put_nowait)
        future = await self._submit(prompt, params, {**fields, "on_chunk": post})
        ended = asyncio.wrap_future(future)
        ended.add_done_callback(lambda _: chunks.put_nowait(None))  # in the loop, after the last chunk
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            ended.result()
        finally:
            future.cancel()

    async def _submit(self, prompt: Any, params: SamplingParams | None, fields: dict[str, Any]) -> Future:
        fields = own_names(fields, SAMPLING_FIELDS)
        submit = partial(self.llm.submit, prompt, params, **fields)
        slow = {*GUIDED_FIELDS, "dry_multiplier"}
        given = fields.get("sampling_params", params)
        if not fields.keys() & slow and not any(getattr(given, name, None) for name in slow):
            return submit()
        submitting = asyncio.get_running_loop().run_in_executor(None, submit)  # a grammar can take seconds
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(lambda found: found.exception() or found.result().cancel())
            raise

    async def close(self) -> None:
        """Close the LLM if this object has made it."""
        if self._is_owner:
            await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *exception) -> None:
        await self.close()
