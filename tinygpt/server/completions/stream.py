"""CompletionStream: a completion as events, one for each token."""

from collections.abc import Iterator

from tinygpt.outputs import StreamChunk
from tinygpt.server.completions.job import CompletionJob
from tinygpt.server.completions.logprobs import TokenLogprobs
from tinygpt.server.completions.reply import described
from tinygpt.server.protocol.completions import Completion, CompletionChoice
from tinygpt.server.replies.events import EventWriter, quoted
from tinygpt.server.transport.event_stream import Write
from tinygpt.server.work.generation import Generation, PromptChunk


class CompletionStream:
    """The events of one job, which may be written once."""

    def __init__(self, job: CompletionJob, generation: Generation):
        self._job, self._generation = job, generation
        self._writer = EventWriter(job.head, job.form.stream_options, job.usage(0).prompt_tokens)
        self._arrays = [job.logprob_arrays() for _ in range(job.num_choices)]
        self._has_begun = [False] * job.num_choices
        # What the engine found of each prompt, once it is known.
        is_told = job.echoes_logprobs or job.form.prompt_logprobs is not None
        self._echoes = [None if is_told else [] for _ in job.prompts]
        self._num_unknown = len(job.prompts) if is_told else 0
        self._waiting: list[PromptChunk] = []
        self._is_plain = job.form.logprobs is None
        self._begins_with_prompt = job.form.echo or job.form.return_token_ids or job.form.prompt_logprobs is not None

    async def events(self, write: Write) -> None:
        """An event for every token, as it comes."""
        await self._generation.follow(lambda chunks, is_last: write(self._take(chunks), is_last))
        write(self._writer.end().encode(), is_last=True)

    async def whole(self, reply: Completion, write: Write) -> None:
        """The events of what has been made already, one for each choice."""
        events = [*map(self._writer.of_choice, reply.choices), self._writer.end()]
        write("".join(events).encode(), is_last=True)

    def _take(self, chunks: list[PromptChunk]) -> bytes:
        """Those of samples that wait for what the first one finds of their prompt are kept back."""
        if self._num_unknown:
            chunks = self._known(chunks)
        return "".join([self._event(i, chunk) for i, chunk in chunks]).encode()

    def _known(self, chunks: list[PromptChunk]) -> list[PromptChunk]:
        for i, chunk in chunks:
            if self._echoes[i] is None and chunk.prompt_logprobs is not None:
                self._echoes[i] = chunk.prompt_logprobs
                self._num_unknown -= 1
        chunks = self._waiting + chunks
        self._waiting = [(i, chunk) for i, chunk in chunks if self._echoes[i] is None]
        return [(i, chunk) for i, chunk in chunks if self._echoes[i] is not None]

    def _event(self, i: int, chunk: StreamChunk) -> str:
        index = i * self._job.params.n + chunk.index
        self._writer.num_tokens += chunk.token_id is not None
        is_first, self._has_begun[index] = not self._has_begun[index], True
        if self._is_plain and chunk.finish_reason is None and not (is_first and self._begins_with_prompt):
            return self._plain_event(index, chunk)
        return self._writer.of_choice(self._choice(i, index, chunk, is_first))

    def _plain_event(self, index: int, chunk: StreamChunk) -> str:
        """One amid a text, written out, as most are.

        A token without a text of its own has none, unless there is more to tell of it.
        """
        ids = f',"token_ids":[{chunk.token_id}]' if self._job.form.return_token_ids else ""
        if not (chunk.text or ids or self._writer.tells_usage):
            return ""
        text = quoted(chunk.text)
        return self._writer.of_json(f'{{"index":{index},"text":{text},"logprobs":null,"finish_reason":null{ids}}}')

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
