"""/generate: an LLM's own requests and outputs, of which OpenAI's API has no room for all. RemoteLLM speaks it."""

from typing import Annotated, Literal

from pydantic import Field

from tinygpt.server.protocol.fields import BestOf, ModelName, NumLogprobs, Positive, Strict, Text, TokenIds
from tinygpt.server.protocol.sampling import SamplingFields

Number = float | Literal["-inf"]
Found = list[dict[str, Number] | None] | None  # for each token: id -> log probability


class GenerateRequest(SamplingFields):
    """LLM.submit's arguments. A prompt has to be there: null or empty, it starts at the BOS token."""

    IS_LIBRARYS = True
    model: ModelName | None = None
    prompt: str | TokenIds | None = Field(description="a text, a list of token ids, or null to start at the BOS token")
    max_tokens: Positive | None = None
    logprobs: NumLogprobs | None = None
    best_of: BestOf | None = None
    stream: bool | None = None
    split_special_tokens: bool | None = None
    cache_salt: Text | None = None


class GeneratedSample(Strict):
    index: int
    text: str | None
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    logprobs: Found
    cumulative_logprob: Number | None
    score: Number | None
    seed: Annotated[int, Field(ge=0, lt=2**64)]


class GeneratedTimes(Strict):
    """A RequestMetrics, its moments in seconds since the request's arrival."""

    scheduled: float | None
    first_token: float | None
    finished: float
    num_steps: int


class Generated(Strict):
    """A RequestOutput. Of a stream it is the last event, as {"output": ...}, behind a {"chunk": ...} for each token."""

    prompt_token_ids: list[int]
    outputs: list[GeneratedSample]
    metrics: GeneratedTimes
    prompt_logprobs: Found
    prompt_cumulative_logprob: Number | None
    num_cached_tokens: int
    num_truncated_tokens: int
