"""/tokenize, /detokenize and /tokenizer_info, as vLLM has them."""

from tinygpt.server.protocol.fields import AnyTokenIds, Model, ModelName, Strict


class TokenizeRequest(Strict):
    """Special tokens written in the prompt are those tokens, which is how their ids are learned."""

    model: ModelName | None = None
    prompt: str
    add_special_tokens: bool | None = None
    split_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeReply(Model):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Strict):
    model: ModelName | None = None
    tokens: AnyTokenIds
    skip_special_tokens: bool | None = None


class DetokenizeReply(Model):
    prompt: str


class TokenizerInfo(Model):
    tokenizer_class: str
    eos_token: str | None
    bos_token: str | None
    pad_token: str | None
    vocab_size: int
    model_max_length: int
    chat_template: str | None
