"""/v1/embeddings: OpenAI's fields, and `pooling`."""

from typing import Annotated, Literal

from pydantic import Field

from tinygpt.server.protocol.fields import MAX_PROMPTS, Model, ModelName, Positive, Strict, Text, TokenIds


class EmbeddingRequest(Strict):
    """pooling: as LLM.embed has it."""

    model: ModelName | None = None
    input: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    ) = Field(description=f"a text, a list of token ids, or a list of up to {MAX_PROMPTS} of either, none empty")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Positive | None = None
    user: str | None = None
    pooling: Literal["last", "mean", "sum"] = "last"
    split_special_tokens: bool | None = None
    add_special_tokens: bool | None = None


class Embedding(Model):
    """base64: of the numbers as little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Model):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Model):
    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
