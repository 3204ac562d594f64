"""From a stream of token ids to a stream of text."""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """All texts pushed out, with what `finish` gives, are decode(ids, skip_special_tokens=True)."""

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes: never part of a character, and often nothing."""

    def push_all(self, token_ids: Sequence[int]) -> str:
        """As `push` of one after another."""

    def finish(self) -> str:
        """What is left when no more ids come: U+FFFD for a character that was never completed."""


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes: UTF-8 decoded as the bytes arrive."""

    def __init__(self, token_bytes: Callable[[int], bytes]):
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def push_all(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class PrefixDetokenizer:
    """For any other tokenizer: decodes all ids so far at each step, and gives what is new.

    That is quadratic in the length, and right for decoders that look at neighbouring tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str], is_plain: Callable[[int], bool]):
        self._decode = decode
        self._is_plain = is_plain
        self._ids: list[int] = []
        self._given = 0

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        # A run of byte tokens becomes characters only if all of it is UTF-8, so it waits for its end, which
        # no token is that gives no text.
        if not self._is_plain(token_id):
            return ""
        return self._new(self._decode(self._ids).rstrip("\ufffd"))

    def push_all(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        self._ids += token_ids[:-1]  # what they complete comes with the last, or after it
        return self.push(token_ids[-1])

    def finish(self) -> str:
        return self._new(self._decode(self._ids))

    def _new(self, text: str) -> str:
        new = text[self._given :]
        self._given += len(new)
        return new
