"""/tokenize, /detokenize and /tokenizer_info, as vLLM has them."""

from typing import Annotated

from pydantic import BaseModel, Field

from tinygpt.server.protocol.fields import ModelName, Strict, TokenId

MAX_TOKENS = 1_000_000  # of one list


class TokenizeRequest(Strict):
    """Special tokens written in the prompt are those tokens, which is how their ids are learned."""

    model: ModelName | None = None
    prompt: str
    add_special_tokens: bool | None = None
    split_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Strict):
    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS)]
    skip_special_tokens: bool | None = None


class DetokenizeReply(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    tokenizer_class: str
    eos_token: str | None
    bos_token: str | None
    pad_token: str | None
    vocab_size: int
    model_max_length: int
    chat_template: str | None
