"""/v1/score, how alike texts are, as vLLM has it; and /score_continuations, how probable they are: LLM.score."""

from typing import Annotated, Literal

from pydantic import Field

from tinygpt.server.protocol.embeddings import EmbeddingUsage
from tinygpt.server.protocol.fields import MAX_PROMPTS, Model, ModelName, Strict, Text, TokenIds
from tinygpt.server.protocol.generate import Number

Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
_TEXTS = f"a text, or a list of up to {MAX_PROMPTS} of them, none empty"


class ScoreRequest(Strict):
    """One text with each of several, or as many of the one as of the other, pair by pair. pooling: as LLM.embed's."""

    model: ModelName | None = None
    text_1: Text | Texts = Field(description=_TEXTS)
    text_2: Text | Texts = Field(description=_TEXTS)
    pooling: Literal["last", "mean", "sum"] = "last"
    user: str | None = None
    split_special_tokens: bool | None = None


class Score(Model):
    """score: from -1 to 1, the cosine of the angle between the texts' embeddings."""

    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(Model):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class ContinuationsRequest(Strict):
    """LLM.score's arguments."""

    IS_LIBRARYS = True
    model: ModelName | None = None
    prompt: str | TokenIds | None = Field(description="a text, a list of token ids, or null to start at the BOS token")
    continuations: Annotated[list[Text | TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    soft_prompt: Text | None = None
    split_special_tokens: bool | None = None
    cache_salt: Text | None = None


class ScoredContinuation(Strict):
    """A ContinuationScore."""

    token_ids: list[int]
    logprobs: list[Number]
    is_greedy: bool


class ScoredContinuations(Strict):
    scores: list[ScoredContinuation]
