"""ChatJob: a chat completion that was asked for and checked, and how its replies are written."""

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

from tinygpt.outputs import CompletionOutput, RequestOutput, StreamChunk
from tinygpt.request.prompts import Prompt
from tinygpt.sampling_params import SamplingParams
from tinygpt.server.event_stream import event
from tinygpt.server.finite import finite
from tinygpt.server.generation import Generation
from tinygpt.server.protocol.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    ChatRequest,
    Delta,
    TopLogprob,
)
from tinygpt.server.protocol.common import StreamOptions, Usage
from tinygpt.server.token_names import TokenNames


@dataclass(frozen=True)
class ChatJob:
    id: str
    created: int
    model: str
    system_fingerprint: str
    form: ChatRequest
    prompt: Prompt
    params: SamplingParams
    names: TokenNames

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }

    def reply(self, output: RequestOutput) -> ChatCompletion:
        num_tokens = sum(len(sample.token_ids) for sample in output.outputs)
        ids = {"prompt_token_ids": output.prompt_token_ids} if self.form.return_token_ids else {}
        return ChatCompletion(
            **self.head("chat.completion"),
            choices=[self._choice(sample) for sample in output.outputs],
            usage=self._usage(num_tokens),
            **ids,
        )

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """First whose words they are, then an event for each token, and the usage last, where it is asked for."""
        options, num_tokens = self.form.stream_options or StreamOptions(), 0
        begin = [ChatChunkChoice(index=i, delta=Delta(role="assistant", content="")) for i in range(self.params.n)]
        yield b"".join(self._event(choice) for choice in begin)
        async for items in generation.chunks():
            chunks = [item.chunk for item in items if item.chunk is not None]
            num_tokens += sum(chunk.token_id is not None for chunk in chunks)
            events = b"".join(self._event(self._chunk(chunk)) for chunk in chunks if self._says_something(chunk))
            if events:
                yield events
        if options.include_usage:
            usage = self._usage(num_tokens).model_dump()
            yield event({**self.head("chat.completion.chunk"), "choices": [], "usage": usage})

    def _event(self, choice: ChatChunkChoice) -> bytes:
        return event({**self.head("chat.completion.chunk"), "choices": [choice.model_dump(exclude_unset=True)]})

    def _says_something(self, chunk: StreamChunk) -> bool:
        return bool(chunk.text or chunk.finish_reason or self.form.logprobs or self.form.return_token_ids)

    def _chunk(self, chunk: StreamChunk) -> ChatChunkChoice:
        found = [] if chunk.logprobs is None else [(chunk.token_id, chunk.logprobs)]
        ids = [] if chunk.token_id is None else [chunk.token_id]
        return ChatChunkChoice(
            index=chunk.index,
            delta=Delta(content=chunk.text),
            logprobs=self._logprobs(found) if self.form.logprobs else None,
            finish_reason=chunk.finish_reason,
            **({} if chunk.finish_reason is None else {"stop_reason": chunk.stop_reason}),
            **({"token_ids": ids} if self.form.return_token_ids else {}),
        )

    def _choice(self, sample: CompletionOutput) -> ChatChoice:
        found = zip(sample.token_ids, sample.logprobs or (), strict=False)
        return ChatChoice(
            index=sample.index,
            message=AssistantMessage(role="assistant", content=sample.text or "", refusal=None),
            logprobs=self._logprobs(found) if self.form.logprobs else None,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            **({"token_ids": sample.token_ids} if self.form.return_token_ids else {}),
        )

    def _logprobs(self, found: Iterable[tuple[int, dict[int, float]]]) -> ChatLogprobs:
        return ChatLogprobs(content=[self._logprob(token_id, entry) for token_id, entry in found])

    def _logprob(self, token_id: int, entry: dict[int, float]) -> ChatLogprob:
        best = list(entry.items())[: self.form.top_logprobs or 0]
        top = [TopLogprob(**self._named(i, logprob)) for i, logprob in best]
        return ChatLogprob(**self._named(token_id, entry[token_id]), top_logprobs=top)

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        token_bytes = list(self.names.bytes_of(token_id))
        return {"token": self.names.name(token_id), "logprob": finite(logprob), "bytes": token_bytes}

    def _usage(self, num_tokens: int) -> Usage:
        return Usage.of(len(self.prompt.token_ids), num_tokens)
