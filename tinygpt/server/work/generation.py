"""Generation: all that one HTTP request has the engine do: several prompts, each with its samples."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from math import inf
from operator import sub

from tinygpt.engine.engine import RequestFuture
from tinygpt.errors import RequestError
from tinygpt.llm import LLM
from tinygpt.outputs import RequestOutput, StreamChunk
from tinygpt.request.prompts import Prompt
from tinygpt.request.request import Progress
from tinygpt.sampling_params import SamplingParams
from tinygpt.server.refusals.errors import ApiError
from tinygpt.server.work.mailbox import Inbox, Mailbox
from tinygpt.server.work.threads import beside

PromptChunk = tuple[int, StreamChunk]  # which of the request's prompts, and a chunk of it


class Generation:
    """What is submitted together, and ends together. For the event loop alone.

    `cancel` may come at any time, and frees every slot by the next step.
    """

    def __init__(self, llm: LLM, mailbox: Mailbox, num_bytes: int = 0):
        """num_bytes: of the request's body, which tells how much there may be to encode."""
        self._llm, self._mailbox, self._num_bytes = llm, mailbox, num_bytes
        self._inbox = Inbox()
        self._futures: list[RequestFuture] = []
        self._reason: ApiError | None = None  # why the server has stopped it
        self._token_times: dict[tuple[int, int], list[float]] = {}  # (prompt, sample) -> when its tokens came

    async def submit(self, requests: Sequence[tuple[Prompt, SamplingParams]], is_streamed: bool = False) -> None:
        """Have all requests run, or none: raises what LLM.submit raises."""
        self._raise_reason()
        self._check_size(requests)
        is_guided = any(params.guidance is not None for _, params in requests)
        try:  # grammars are compiled first, some of them for a second, and the texts that may not come are encoded
            await beside(inf if is_guided else self._num_bytes, self._submit, requests, is_streamed)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._reason is not None:  # it came meanwhile
            self.cancel()
            raise self._reason

    def _submit(self, requests: Sequence[tuple[Prompt, SamplingParams]], is_streamed: bool) -> None:
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

    async def run(self, requests: Sequence[tuple[Prompt, SamplingParams]]) -> list[RequestOutput]:
        """Submit them, and wait for what becomes of each. The first error of any of them ends all."""
        await self.submit(requests)
        try:
            return await asyncio.gather(*map(asyncio.wrap_future, self._futures[-len(requests) :]))
        except asyncio.CancelledError:
            self._raise_reason()
            raise
        finally:
            self.cancel()

    async def follow(self, take: Callable[[list[PromptChunk], bool], None]) -> None:
        """Have `take` called with all chunks, as they come, until the last sample has ended, and with whether it has.

        The loop itself calls it: to wake a task for each token of each stream would take longer than what it does.
        """
        ended, num_running = asyncio.get_running_loop().create_future(), len(self._futures)

        def read(items: list[tuple[int, StreamChunk | None]]) -> None:
            nonlocal num_running
            if ended.done():  # or the client has left
                return
            chunks = [item for item in items if item[1] is not None]
            num_running -= len(items) - len(chunks)
            try:
                if chunks:
                    take(chunks, not num_running)
            except Exception as error:
                ended.set_exception(error)
                return
            if not num_running:
                ended.set_result(None)

        try:
            self._inbox.read_by(read)
            await ended
            self._raise_reason()
            for future in self._futures:
                future.result()  # or the error that ended it
        finally:
            self._inbox.read_by(lambda items: None)  # or what has read would stay, as it knows this generation
            self.cancel()

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()

    def stop(self, reason: ApiError) -> None:
        """Cancel it, and have whoever waits for it be told why."""
        self._reason = reason
        self.cancel()

    def outcome(self) -> tuple[list[RequestOutput], list[Progress]]:
        """What has come to an end by itself so far; and how far all else has come, which its client has left, or the
        server has stopped.

        Each is looked at once: a step may just be ending it.
        """
        found = [future.result() if _is_finished(future) else future.progress() for future in self._futures]
        outputs = [each for each in found if isinstance(each, RequestOutput)]
        return outputs, [each for each in found if isinstance(each, Progress)]

    def token_gaps(self) -> Iterator[float]:
        """Seconds from each token of a streamed sample to its next one."""
        for times in list(self._token_times.values()):  # the thread that takes steps may add another sample
            yield from map(sub, times[1:], times)

    @property
    def is_over(self) -> bool:
        """Whether nothing of it runs, or waits."""
        return all(future.done() for future in self._futures)

    def _post(self, prompt_index: int, chunk: StreamChunk | None) -> None:
        """By the thread that takes steps, which has more to do: what is not needed now is left to others. None: the
        prompt has ended."""
        is_urgent = chunk is None  # the end, behind which a client asks again
        if chunk is not None and chunk.token_id is not None:
            times = self._token_times.setdefault((prompt_index, chunk.index), [])
            times.append(time.perf_counter())
            is_urgent = len(times) == 1
        self._mailbox.post(self._inbox, (prompt_index, chunk), is_urgent)

    def _raise_reason(self) -> None:
        if self._reason is not None:
            raise self._reason

    def _check_size(self, requests: Sequence[tuple[Prompt, SamplingParams]]) -> None:
        """What no queue will ever have room for must not be tried again."""
        sizes = self._llm.engine.engine_config
        if sizes.max_queue is None:
            return
        count, room = sum(params.best_of or params.n for _, params in requests), sizes.max_queue + sizes.max_num_seqs
        if count > room:
            raise RequestError(f"the request asks for {count} samples and this server takes {room} at most: split it.")


def _is_finished(future: Future) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
