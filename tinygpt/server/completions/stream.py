"""CompletionStream: a completion as events, one for each token."""

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from tinygpt.outputs import StreamChunk
from tinygpt.server.completions.job import CompletionJob
from tinygpt.server.completions.logprobs import TokenLogprobs
from tinygpt.server.completions.reply import described
from tinygpt.server.event_stream import compact
from tinygpt.server.generation import Generation, PromptChunk
from tinygpt.server.protocol.common import StreamOptions
from tinygpt.server.protocol.completions import Completion, CompletionChoice

OBFUSCATED_SIZE = 64  # bytes: events are as long as multiples of it


class CompletionStream:
    """The events of one job, which may be read once."""

    def __init__(self, job: CompletionJob, generation: Generation):
        self._job, self._generation = job, generation
        self._options = job.form.stream_options or StreamOptions()
        self._arrays = [job.logprob_arrays() for _ in range(job.num_choices)]
        self._has_begun = [False] * job.num_choices
        self._echoes = [
            None if job.echoes_logprobs or job.form.prompt_logprobs is not None else [] for _ in job.prompts
        ]  # what the engine found of each
        self._num_tokens = 0
        # What is the same in every event is written once.
        self._head = f'data: {compact(job.head)[:-1]},"choices":['
        self._is_plain = job.form.logprobs is None and not self._options.include_obfuscation
        self._begins_with_prompt = job.form.echo or job.form.return_token_ids or job.form.prompt_logprobs is not None
        self._num_prompt_tokens = job.usage(0).prompt_tokens

    async def events(self) -> AsyncIterator[bytes]:
        """Each piece holds an event for every token that has come meanwhile."""
        waiting: list[PromptChunk] = []
        async for items in self._generation.chunks():
            ready, waiting = self._sort(waiting + items)
            events = "".join(self._event(*item) for item in ready)
            if events:
                yield events.encode()
        if self._options.include_usage:
            yield self._dump({"choices": [], "usage": self._usage()}).encode()

    async def whole(self, reply: Completion) -> AsyncIterator[bytes]:
        """The events of what has been made already, one for each choice."""
        for choice in reply.choices:
            yield self._dump({"choices": [choice.model_dump(exclude_unset=True)]}).encode()
        if self._options.include_usage:
            yield self._dump({"choices": [], "usage": reply.usage.model_dump()}).encode()

    def _sort(self, items: Iterable[PromptChunk]) -> tuple[list[PromptChunk], list[PromptChunk]]:
        """Chunks that can be written, and those of samples that wait for what the first one finds of the prompt."""
        chunks = [item for item in items if item.chunk is not None]
        for i, chunk in chunks:
            if self._echoes[i] is None:
                self._echoes[i] = chunk.prompt_logprobs
        ready = [item for item in chunks if self._echoes[item.prompt_index] is not None]
        return ready, [item for item in chunks if self._echoes[item.prompt_index] is None]

    def _event(self, i: int, chunk: StreamChunk) -> str:
        index = i * self._job.params.n + chunk.index
        self._num_tokens += chunk.token_id is not None
        is_first, self._has_begun[index] = not self._has_begun[index], True
        if self._is_plain and chunk.finish_reason is None and not (is_first and self._begins_with_prompt):
            return self._plain_event(index, chunk)
        choice = self._choice(i, index, chunk, is_first)
        reply: dict[str, Any] = {"choices": [choice.model_dump(exclude_unset=True)]}
        if self._options.continuous_usage_stats:
            reply["usage"] = self._usage()
        return self._dump(reply)

    def _plain_event(self, index: int, chunk: StreamChunk) -> str:
        """One amid a text, written out: it takes a thirtieth of the time that its model does, and most events are such.

        A token without a text of its own has none, unless there is more to tell of it.
        """
        ids = f',"token_ids":[{chunk.token_id}]' if self._job.form.return_token_ids else ""
        usage = ""
        if self._options.continuous_usage_stats:
            read, made = self._num_prompt_tokens, self._num_tokens
            usage = f',"usage":{{"prompt_tokens":{read},"completion_tokens":{made},"total_tokens":{read + made}}}'
        if not (chunk.text or ids or usage):
            return ""
        choice = f'{{"index":{index},"text":{json.dumps(chunk.text)},"logprobs":null,"finish_reason":null{ids}}}'
        return f"{self._head}{choice}]{usage}}}\n\n"

    def _choice(self, i: int, index: int, chunk: StreamChunk, is_first: bool) -> CompletionChoice:
        is_echoed = is_first and self._job.form.echo
        arrays = self._arrays[index]
        ids = {}
        if self._job.form.return_token_ids:
            ids["token_ids"] = [] if chunk.token_id is None else [chunk.token_id]
            if is_first:
                ids["prompt_token_ids"] = self._job.prompts[i].token_ids
        if is_first and self._job.form.prompt_logprobs is not None:
            found = zip(self._job.prompts[i].token_ids, self._echoes[i], strict=False)
            ids["prompt_logprobs"] = [described(self._job, *each) for each in found]
        return CompletionChoice(
            index=index,
            text=(self._job.prompt_text(i) if is_echoed else "") + chunk.text,
            logprobs=None if arrays is None else arrays.add(self._tokens(i, chunk, is_echoed)),
            finish_reason=chunk.finish_reason,
            **ids,
            **({} if chunk.finish_reason is None else {"stop_reason": chunk.stop_reason}),
        )

    def _tokens(self, i: int, chunk: StreamChunk, is_echoed: bool) -> Iterator[TokenLogprobs]:
        if is_echoed:
            yield from self._job.echoed_tokens(i, self._echoes[i])
        if chunk.logprobs is not None:
            yield TokenLogprobs(chunk.token_id, chunk.logprobs)

    def _usage(self) -> dict[str, Any]:
        return self._job.usage(self._num_tokens).model_dump()

    def _dump(self, reply: dict[str, Any]) -> str:
        event = f"data: {compact(self._job.head | reply)}\n\n"
        if not self._options.include_obfuscation:
            return event
        padding = "x" * (-len(event + ',"obfuscation":""') % OBFUSCATED_SIZE)
        return f'{event[:-3]},"obfuscation":"{padding}"}}\n\n'
