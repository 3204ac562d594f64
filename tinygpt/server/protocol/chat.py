"""/v1/chat/completions: OpenAI's fields, and vLLM's."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tinygpt.server.protocol.common import StreamOptions, Usage
from tinygpt.server.protocol.fields import BestOf, Model, ModelName, NumLogprobs, Positive, Strict, Text
from tinygpt.server.protocol.guided import GuidedFields

MAX_MESSAGES = 10_000


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] = Field(
        description='a text, or a list of {"type": "text", "text": ...}'
    )
    name: str | None = None


class ChatRequest(GuidedFields):
    """max_tokens is the older name of max_completion_tokens; without either, all that fits is generated at most."""

    model: ModelName | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    best_of: BestOf | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    user: str | None = None
    cache_salt: Text | None = None
    return_token_ids: bool | None = None

    def name_of(self, field: str) -> str | None:
        if field == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return "messages" if field == "prompt" else super().name_of(field)


class TopLogprob(Model):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Model):
    content: list[ChatLogprob]


class AssistantMessage(Model):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: str | None = None


class ChatChoice(Model):
    """token_ids are there where they are asked for."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Model):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class Delta(Model):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Model):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
