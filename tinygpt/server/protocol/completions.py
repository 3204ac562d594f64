"""/v1/completions: OpenAI's fields, and vLLM's."""

from typing import Annotated, Literal

from pydantic import Field

from tinygpt.server.protocol.common import StreamOptions, Usage
from tinygpt.server.protocol.fields import (
    MAX_PROMPTS,
    BestOf,
    Count,
    Model,
    ModelName,
    NumLogprobs,
    Text,
    TokenIds,
)
from tinygpt.server.protocol.guided import GuidedFields


class CompletionRequest(GuidedFields):
    """A prompt has to be there, so that none is forgotten: null or empty, it starts at the BOS token."""

    model: ModelName | None = None
    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | None
    ) = Field(
        description=f"a text, a list of token ids, a list of up to {MAX_PROMPTS} of either, or null to start at BOS"
    )
    best_of: BestOf | None = None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    suffix: str | None = None
    user: str | None = None
    split_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: Text | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class Logprobs(Model):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    top_token_ids: list[dict[str, int] | None] | None = None  # of top_logprobs' names, where ids are asked for


class TokenLogprob(Model):
    logprob: float
    rank: int | None
    decoded_token: str


class CompletionChoice(Model):
    """The last three are there where they are asked for, and prompt_logprobs are vLLM's: id -> what it is."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, TokenLogprob] | None] | None = None


class Completion(Model):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
