"""Which special tokens of a conversation are the template's own, and which a message only spells.

Whoever could write the marks of a template into a message would speak in another role's name. So a sign that nobody can
guess is put inside each special token that a message holds, or an option of the template's, and behind what may become
one with the text after it. Where the sign is not, the template has written the token itself.
"""

import re
import secrets
from collections.abc import Callable, Iterable
from typing import Any


class Marks:
    """special_tokens: how they are written. One object for one conversation."""

    def __init__(self, special_tokens: Iterable[str]):
        self._tokens = sorted(filter(None, special_tokens), key=len, reverse=True)  # the longest is found first
        self._pattern = re.compile("|".join(map(re.escape, self._tokens)) or r"(?!)")
        self._sign = secrets.token_hex(16)

    def guard(self, text: str) -> str:
        """What a message says, unable to be or become a special token."""
        text = self._pattern.sub(lambda found: found[0][:1] + self._sign + found[0][1:], text)
        end = text.rstrip()
        return end + self._sign + text[len(end) :] if self._may_go_on(end) else text

    def guard_all(self, value: Any) -> Any:
        """All texts in a value of JSON."""
        if isinstance(value, str):
            return self.guard(value)
        if isinstance(value, list):
            return [*map(self.guard_all, value)]
        if isinstance(value, dict):
            return {self.guard(name): self.guard_all(each) for name, each in value.items()}
        return value

    def encode(self, text: str, encode: Callable[[str, bool], list[int]]) -> list[int]:
        """The token ids of a template's text. encode(text, split_special_tokens)."""
        ids, start = [], 0
        for found in self._pattern.finditer(text):
            ids += self._encode_plain(text[start : found.start()], encode) + encode(found[0], False)
            start = found.end()
        return ids + self._encode_plain(text[start:], encode)

    def without_signs(self, text: str) -> str:
        return text.replace(self._sign, "")

    def _encode_plain(self, text: str, encode: Callable[[str, bool], list[int]]) -> list[int]:
        plain = self.without_signs(text)
        return encode(plain, True) if plain else []

    def _may_go_on(self, text: str) -> bool:
        return any(text.endswith(token[:length]) for token in self._tokens for length in range(1, len(token)))
