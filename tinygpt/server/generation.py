"""Generation: all that one HTTP request has the engine generate: several prompts, each with its samples."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from tinygpt.errors import RequestError
from tinygpt.llm import LLM
from tinygpt.outputs import RequestOutput, StreamChunk
from tinygpt.request.prompts import Prompt
from tinygpt.sampling_params import SamplingParams
from tinygpt.server.mailbox import Inbox, Mailbox


class PromptChunk(NamedTuple):
    """A chunk of one of several prompts; None where it has ended."""

    prompt_index: int
    chunk: StreamChunk | None


class Generation:
    """Submitted at once and cancelled at once; `cancel` may be called at any time, and frees every slot by the next
    step."""

    def __init__(self, llm: LLM, mailbox: Mailbox):
        self._llm, self._mailbox = llm, mailbox
        self._inbox = Inbox()
        self._futures: list[Future[RequestOutput]] = []

    def submit(self, requests: Sequence[tuple[Prompt, SamplingParams]], is_streamed: bool = False) -> None:
        """Have all requests run, or none: raises what LLM.submit raises."""
        self._check_size(requests)
        try:
            for i, (prompt, params) in enumerate(requests):
                on_chunk = partial(self._post, i) if is_streamed else None
                self._futures.append(self._llm.submit(prompt, params, on_chunk))
        except BaseException:
            self.cancel()
            raise
        if is_streamed:
            for i, future in enumerate(self._futures):
                future.add_done_callback(lambda _, i=i: self._post(i, None))

    async def outputs(self) -> list[RequestOutput]:
        try:
            return await asyncio.gather(*map(asyncio.wrap_future, self._futures))
        finally:
            self.cancel()

    async def chunks(self) -> AsyncIterator[list[PromptChunk]]:
        """All chunks that have come since the last time, until the last sample has ended."""
        num_running = len(self._futures)
        try:
            while num_running:
                items = await self._inbox.take()
                num_running -= sum(item.chunk is None for item in items)
                yield items
            for future in self._futures:
                future.result()  # or the error that ended it
        finally:
            self.cancel()

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()

    def _post(self, prompt_index: int, chunk: StreamChunk | None) -> None:
        self._mailbox.post(self._inbox, PromptChunk(prompt_index, chunk))

    def _check_size(self, requests: Sequence[tuple[Prompt, SamplingParams]]) -> None:
        """What no queue will ever have room for must not be tried again."""
        sizes = self._llm.engine.engine_config
        if sizes.max_queue is None:
            return
        count, room = sum(params.best_of or params.n for _, params in requests), sizes.max_queue + sizes.max_num_seqs
        if count > room:
            raise RequestError(f"the request asks for {count} samples and this server takes {room} at most: split it.")
