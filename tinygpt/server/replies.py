"""Replies and events as JSON: token names, log probabilities, usage, and an LLM's outputs."""

import codecs
import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from tinygpt.errors import RequestError
from tinygpt.server.protocol import StreamOptions
from tinygpt.tokenizer.tokenizer import Tokenizer

LOWEST = -9999.0  # as OpenAI and vLLM write smaller log probabilities: JSON has no infinity
OBFUSCATED_SIZE = 64  # bytes
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
Logprobs = dict[int, float]


def event(value: dict[str, Any]) -> bytes:
    return f"data: {to_json(value)}\n\n".encode()


def usage(num_read: int, num_made: int) -> dict[str, int]:
    return {"prompt_tokens": num_read, "completion_tokens": num_made, "total_tokens": num_read + num_made}


class TokenNames:
    """Names of tokens: the text, or the bytes of a partial character, or the id of a token without bytes."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer, self.has_tokenizer = tokenizer, tokenizer is not None
        self.name = lru_cache(maxsize=100_000)(self._name)

    def bytes_of(self, token_id: int) -> bytes:
        if self._tokenizer is None:
            return b""
        try:
            return self._tokenizer.token_bytes(token_id)
        except RequestError:  # this tokenizer's tokens are characters
            return self._tokenizer.decode([token_id]).encode()

    def _name(self, token_id: int) -> str:
        token_bytes = self.bytes_of(token_id)
        if not token_bytes:
            return f"token_id:{token_id}"
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


class CompletionLogprobs:
    """The lists of one choice of /v1/completions. Offsets continue from one chunk to the next."""

    def __init__(self, names: TokenNames, num_top: int, by_id: bool, with_ids: bool):
        """by_id: name tokens by their ids. with_ids: also list the ids of the most probable tokens."""
        self._names, self._num_top, self._with_ids = names, num_top, with_ids
        self._name = "token_id:{}".format if by_id else names.name
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def add(self, tokens: Iterable[tuple[int, Logprobs | None]]) -> dict[str, list]:
        lists: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if self._with_ids:
            lists["top_token_ids"] = []
        for token_id, logprobs in tokens:
            top = logprobs and _best(logprobs, self._num_top, token_id)
            lists["tokens"].append(self._name(token_id))
            lists["token_logprobs"].append(logprobs and max(logprobs[token_id], LOWEST))
            lists["top_logprobs"].append(top and {self._name(i): max(value, LOWEST) for i, value in top.items()})
            lists["text_offset"].append(self._offset)
            if self._with_ids:
                lists["top_token_ids"].append(top and {self._name(i): i for i in top})
            self._offset += len(self._decoder.decode(self._names.bytes_of(token_id)))
        return lists


def chat_logprobs(names: TokenNames, num_top: int, tokens: Iterable[tuple[int, Logprobs]]) -> dict[str, list]:
    def named(token_id: int, value: float) -> dict[str, Any]:
        return {"token": names.name(token_id), "logprob": max(value, LOWEST), "bytes": list(names.bytes_of(token_id))}

    return {
        "content": [
            {**named(i, logprobs[i]), "top_logprobs": [named(*pair) for pair in list(logprobs.items())[:num_top]]}
            for i, logprobs in tokens
        ]
    }


def described(names: TokenNames, num_top: int, token_id: int, logprobs: Logprobs | None) -> dict[str, Any] | None:
    """Return vLLM's entry of prompt_logprobs. The rank is known of the most probable tokens only."""
    if logprobs is None:
        return None
    ranks = {i: rank for rank, i in enumerate(list(logprobs)[:num_top], 1)}
    return {
        str(i): {"logprob": max(value, LOWEST), "rank": ranks.get(i), "decoded_token": names.name(i)}
        for i, value in _best(logprobs, num_top, token_id).items()
    }


def _best(logprobs: Logprobs, num_top: int, token_id: int) -> Logprobs:
    """Return the most probable tokens, then the token itself."""
    return dict(list(logprobs.items())[:num_top]) | {token_id: logprobs[token_id]}


class EventWriter:
    """Events of one streamed reply. Their common beginning is encoded once."""

    def __init__(self, head: dict[str, Any], options: StreamOptions | None, num_read: int):
        options = options or StreamOptions()
        self._head = f'data: {to_json(head)[:-1]},"choices":['
        self._num_read, self.num_made = num_read, 0
        self.tells_usage = bool(options.continuous_usage_stats)
        self._ends_with_usage, self._is_padded = bool(options.include_usage), bool(options.include_obfuscation)

    def write(self, choice: dict[str, Any]) -> str:
        return self._event(to_json(choice), self.tells_usage)

    def end(self) -> bytes:
        return self._event("", True).encode() if self._ends_with_usage else b""

    def _event(self, choices: str, with_usage: bool) -> str:
        counts = f',"usage":{to_json(usage(self._num_read, self.num_made))}' if with_usage else ""
        written = f"{self._head}{choices}]{counts}}}\n\n"
        if not self._is_padded:
            return written
        padding = "x" * (-len(written + ',"obfuscation":""') % OBFUSCATED_SIZE)
        return f'{written[:-3]},"obfuscation":"{padding}"}}\n\n'
