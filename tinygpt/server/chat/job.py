"""ChatJob: a chat completion that was asked for and checked, and how its reply is written."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tinygpt.outputs import CompletionOutput, RequestOutput
from tinygpt.request.prompts import Prompt
from tinygpt.sampling_params import SamplingParams
from tinygpt.server.protocol.chat import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    ChatRequest,
    TopLogprob,
)
from tinygpt.server.protocol.common import Usage
from tinygpt.server.replies.finite import finite
from tinygpt.server.replies.token_names import TokenNames


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
            usage=self.usage(num_tokens),
            **ids,
        )

    def _choice(self, sample: CompletionOutput) -> ChatChoice:
        found = zip(sample.token_ids, sample.logprobs or (), strict=False)
        return ChatChoice(
            index=sample.index,
            message=AssistantMessage(role="assistant", content=sample.text or "", refusal=None),
            logprobs=self.logprobs(found) if self.form.logprobs else None,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            **({"token_ids": sample.token_ids} if self.form.return_token_ids else {}),
        )

    def logprobs(self, found: Iterable[tuple[int, dict[int, float]]]) -> ChatLogprobs:
        return ChatLogprobs(content=[self._logprob(token_id, entry) for token_id, entry in found])

    def _logprob(self, token_id: int, entry: dict[int, float]) -> ChatLogprob:
        best = list(entry.items())[: self.form.top_logprobs or 0]
        top = [TopLogprob(**self._named(i, logprob)) for i, logprob in best]
        return ChatLogprob(**self._named(token_id, entry[token_id]), top_logprobs=top)

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        token_bytes = list(self.names.bytes_of(token_id))
        return {"token": self.names.name(token_id), "logprob": finite(logprob), "bytes": token_bytes}

    def usage(self, num_tokens: int) -> Usage:
        return Usage.of(len(self.prompt.token_ids), num_tokens)
