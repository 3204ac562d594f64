"""RemoteTokenizer: the tokenizer of a model that runs behind a server."""

from collections.abc import Iterable
from typing import Any

from tinygpt.errors import RequestError
from tinygpt.remote.connections import Connections
from tinygpt.remote.wire import understood
from tinygpt.request.prompts import checked_ids


class RemoteTokenizer:
    """`encode`, `decode` and the call of a Tokenizer, each a request. split_special_tokens: as RemoteLLM's."""

    def __init__(self, connections: Connections, split_special_tokens: bool):
        self._connections, self.split_special_tokens = connections, split_special_tokens

    def encode(self, text: str, split_special_tokens: bool | None = None) -> list[int]:
        """The token ids of a text. split_special_tokens: special tokens written in it are plain text."""
        if split_special_tokens is None:
            split_special_tokens = self.split_special_tokens
        if not isinstance(text, str):
            raise RequestError(f"a text to encode must be a string; {type(text).__name__} was given.")
        body = {"prompt": text, "split_special_tokens": split_special_tokens}
        found = self._connections.post("/tokenize", body)
        with understood():
            return found["tokens"]

    def __call__(self, text: str | list[str], split_special_tokens: bool | None = None) -> dict[str, list]:
        """As Hugging Face's: {"input_ids": token ids, "attention_mask": ones}, lists of them for a list of texts."""
        if isinstance(text, str):
            ids = self.encode(text, split_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        each = [self(one, split_special_tokens) for one in text]
        return {name: [encoded[name] for encoded in each] for name in ("input_ids", "attention_mask")}

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        found = self._connections.post(
            "/detokenize", {"tokens": checked_ids(ids), "skip_special_tokens": skip_special_tokens}
        )
        with understood():
            return found["prompt"]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a RemoteTokenizer has no {name}: it encodes and decodes, and the rest is in the server.")
