"""What a request gives back."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a request. `text` is None where the checkpoint has no tokenizer."""

    index: int  # which of the request's n samples
    text: str | None
    token_ids: list[int]  # the token that ended the sample included
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None  # the token id or the stop string that ended it
    logprobs: list[dict[int, float]] | None  # per new token: id -> log probability, the chosen id included
    cumulative_logprob: float | None  # sum over the chosen tokens
    seed: int  # with the same prompt and parameters, this seed repeats the request


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request, in seconds of time.perf_counter()."""

    arrival: float
    first_token: float
    finished: float


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its samples. `prompt` is None where token ids were given."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics


@dataclass(frozen=True)
class StreamChunk:
    """The text that became certain with one more token, and that token. The last chunk has a finish reason."""

    text: str
    token_id: int
    finish_reason: Literal["stop", "length"] | None = None
