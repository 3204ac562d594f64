"""TokenNames: how a reply spells a token, as OpenAI's does."""

from collections.abc import Callable
from functools import lru_cache

from tinygpt.errors import RequestError
from tinygpt.tokenizer.tokenizer import Tokenizer


class TokenNames:
    """A token's text, or its bytes where these are no text by themselves, so that no two tokens of GPT-2 share a name.

    An id that stands for no text, such as one of a padded vocabulary, is `token_id:50300`; so is each where there is no
    tokenizer (None).
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self.name = lru_cache(maxsize=100_000)(self._name)

    def bytes_of(self, token_id: int) -> bytes:
        if self._tokenizer is None:
            return b""
        try:
            return self._tokenizer.token_bytes(token_id)
        except RequestError:  # its tokens are no bytes, but whole characters
            return self._tokenizer.decode([token_id]).encode()

    def _name(self, token_id: int) -> str:
        token_bytes = self.bytes_of(token_id)
        if not token_bytes:
            return name_by_id(token_id)
        try:
            return token_bytes.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def name_by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


Namer = Callable[[int], str]
