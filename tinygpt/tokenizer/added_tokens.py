"""Added tokens: strings that are one token each, found in a text before byte-pair encoding sees it."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

# Unicode's White_Space, which str.isspace() and Python's \s exceed by four control characters.
WHITESPACE = frozenset(
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)


@dataclass(frozen=True)
class AddedToken:
    """One entry of tokenizer.json's `added_tokens`, with Hugging Face's names and defaults."""

    id: int
    content: str
    special: bool = False
    normalized: bool = True
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False


class AddedTokenSplitter:
    """Splits a text at the added tokens in it, as Hugging Face's `tokenizers` does.

    Tokens with normalized=False are looked for first, then the others in what is left; of those that start
    at one place the longest is taken.
    """

    def __init__(self, tokens: Iterable[AddedToken]):
        tokens = list(tokens)
        passes = ([t for t in tokens if not t.normalized], [t for t in tokens if t.normalized])
        self._passes = [_Pass(group) for group in passes if group]

    def split(self, text: str, split_special_tokens: bool) -> Iterator[str | int]:
        """The text in order: an id for each added token found, a non-empty string for what lies between.

        split_special_tokens: a special token stays text, and also hides the tokens of its own pass that it overlaps.
        """
        parts: list[str | int] = [text] if text else []
        for matcher in self._passes:
            if split_special_tokens and matcher.are_all_special:
                continue  # it would find nothing: GPT-2's own vocabulary has no other kind
            split = (matcher.split(part, split_special_tokens) if isinstance(part, str) else [part] for part in parts)
            parts = [*chain.from_iterable(split)]
        return iter(parts)


class _Pass:
    def __init__(self, tokens: list[AddedToken]):
        self._by_content = {token.content: token for token in tokens}
        # re takes the first alternative that matches, so the longest stand first.
        contents = sorted(self._by_content, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, contents)))
        self.are_all_special = all(token.special for token in tokens)

    def split(self, text: str, split_special_tokens: bool) -> Iterator[str | int]:
        start = 0
        for match in self._pattern.finditer(text):
            token = self._by_content[match.group()]
            if split_special_tokens and token.special:
                continue
            begin, end = match.span()
            while token.lstrip and begin > start and text[begin - 1] in WHITESPACE:
                begin -= 1
            while token.rstrip and end < len(text) and text[end] in WHITESPACE:
                end += 1
            if start < begin:
                yield text[start:begin]
            # A token of white space may lie wholly in what the one before it has stripped.
            if not token.lstrip or max(begin, start) < end:
                yield token.id
            start = end
        if start < len(text):
            yield text[start:]
