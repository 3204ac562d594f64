"""ChatStream: a chat completion as events: first whose words they are, then one for each token."""

from tinygpt.outputs import StreamChunk
from tinygpt.server.chat.job import ChatJob
from tinygpt.server.protocol.chat import ChatChunkChoice, Delta
from tinygpt.server.replies.events import EventWriter, quoted
from tinygpt.server.transport.event_stream import Write
from tinygpt.server.work.generation import Generation, PromptChunk


class ChatStream:
    """The events of one job, which may be written once."""

    def __init__(self, job: ChatJob, generation: Generation):
        self._job, self._generation = job, generation
        head = job.head("chat.completion.chunk")
        self._writer = EventWriter(head, job.form.stream_options, job.usage(0).prompt_tokens)

    async def events(self, write: Write) -> None:
        roles = (Delta(role="assistant", content="") for _ in range(self._job.params.n))
        begin = [self._writer.of_choice(ChatChunkChoice(index=i, delta=role)) for i, role in enumerate(roles)]
        write("".join(begin).encode())
        await self._generation.follow(lambda chunks, is_last: write(self._take(chunks), is_last))
        write(self._writer.end().encode(), is_last=True)

    def _take(self, chunks: list[PromptChunk]) -> bytes:
        return "".join([self._event(chunk) for _, chunk in chunks]).encode()

    def _event(self, chunk: StreamChunk) -> str:
        self._writer.num_tokens += chunk.token_id is not None
        if self._job.form.logprobs or chunk.finish_reason is not None:
            return self._writer.of_choice(self._choice(chunk))
        return self._plain_event(chunk)

    def _plain_event(self, chunk: StreamChunk) -> str:
        """One amid a text, written out, as most are; none for a token of which there is nothing to tell."""
        ids = f',"token_ids":[{chunk.token_id}]' if self._job.form.return_token_ids else ""
        if not (chunk.text or ids or self._writer.tells_usage):
            return ""
        delta = f'{{"content":{quoted(chunk.text)}}}'
        return self._writer.of_json(
            f'{{"index":{chunk.index},"delta":{delta},"logprobs":null,"finish_reason":null{ids}}}'
        )

    def _choice(self, chunk: StreamChunk) -> ChatChunkChoice:
        found = [] if chunk.logprobs is None else [(chunk.token_id, chunk.logprobs)]
        ids = [] if chunk.token_id is None else [chunk.token_id]
        return ChatChunkChoice(
            index=chunk.index,
            delta=Delta(content=chunk.text),
            logprobs=self._job.logprobs(found) if self._job.form.logprobs else None,
            finish_reason=chunk.finish_reason,
            **({} if chunk.finish_reason is None else {"stop_reason": chunk.stop_reason}),
            **({"token_ids": ids} if self._job.form.return_token_ids else {}),
        )
