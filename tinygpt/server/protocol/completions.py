"""/v1/completions: OpenAI's fields, and vLLM's."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from tinygpt.server.protocol.fields import (
    MAX_PROMPTS,
    BestOf,
    Count,
    ModelName,
    NumLogprobs,
    Strict,
    Text,
    TokenIds,
)
from tinygpt.server.protocol.sampling import SamplingFields


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class CompletionRequest(SamplingFields):
    """prompt: null or "" starts at the BOS token."""

    model: ModelName
    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
        | None
    ) = None
    best_of: BestOf | None = None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    suffix: str | None = None
    user: str | None = None
    split_special_tokens: bool | None = None
    cache_salt: Text | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Logprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
