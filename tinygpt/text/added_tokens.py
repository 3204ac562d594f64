"""Added tokens: strings that are one token each, split off before BPE."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from ..errors import CheckpointError

FLAGS = {"special": False, "normalized": True, "single_word": False, "lstrip": False, "rstrip": False}
Token = dict[str, Any]  # an entry of tokenizer.json's `added_tokens`: id, content and FLAGS


class AddedTokenSplitter:
    """Splits at added tokens as `tokenizers`: normalized=False first, longest first."""

    def __init__(self, tokens: Iterable[Token]):
        self._by_content = {token["content"]: token for token in tokens}
        contents = sorted(
            self._by_content, key=len, reverse=True
        )  # re takes the first alternative that matches
        passes = [
            [c for c in contents if self._by_content[c]["normalized"] is flag] for flag in (False, True)
        ]
        self._patterns = [re.compile("|".join(map(re.escape, group))) for group in passes if group]

    def split(self, text: str, split_special_tokens: bool) -> list[str | int]:
        """Return ids of added tokens, and the non-empty strings between them.

        split_special_tokens: a special token stays text, and hides overlapped tokens of its pass.
        """
        parts: list[str | int] = [text] if text else []
        for pattern in self._patterns:
            split = (
                self._split(pattern, p, split_special_tokens) if isinstance(p, str) else [p] for p in parts
            )
            parts = [*chain.from_iterable(split)]
        return parts

    def _split(self, pattern: re.Pattern, text: str, split_special_tokens: bool) -> Iterator[str | int]:
        start = 0
        for match in pattern.finditer(text):
            token = self._by_content[match.group()]
            if split_special_tokens and token["special"]:
                continue
            if start < match.start():
                yield text[start : match.start()]
            yield token["id"]
            start = match.end()
        if start < len(text):
            yield text[start:]


MAX_CHARACTERS = 1000  # the search takes time in the square of a token's length


def read_added_tokens(spec: dict[str, Any], options: dict[str, Any]) -> list[Token]:
    """Return each added token once, as tokenizer.json lists them.

    options: tokenizer_config.json with special_tokens_map.json, and added_tokens.json as `added_tokens`. Raise
        CheckpointError if an id differs from Hugging Face's.
    """
    tokens: dict[str, Token] = {}
    vocab = spec["model"].get("vocab")
    ids = vocab if isinstance(vocab, dict) else {token: i for i, (token, _) in enumerate(vocab or ())}
    next_id = len(ids)
    for entry in _entries(spec, options):
        content = content_of(entry)
        if content and content not in tokens:
            token_id = ids.get(content, next_id)
            next_id = max(next_id, token_id + 1)
            tokens[content] = added_token(entry, token_id)
    return [*tokens.values()]


def content_of(token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise CheckpointError(f"the tokenizer's files name {token!r} as a token; it must be a string.")
    return content


def _entries(spec: dict[str, Any], options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    named = list(_special_tokens(options))
    special = {content_of(token) for token in named}
    decoder = {int(i): entry for i, entry in options.get("added_tokens_decoder", {}).items()}
    listed_again = {content_of(entry): entry for entry in decoder.values()}
    for entry in spec.get("added_tokens") or ():
        yield {**listed_again.get(content_of(entry), entry), "id": entry["id"]}
    yield from ({**decoder[i], "id": i} for i in sorted(decoder))
    older = options.get("added_tokens", {})
    for content in sorted(older, key=older.get):
        yield {"content": content, "id": older[content], "special": content in special}
    yield from map(_named_entry, named)


def _named_entry(token: Any) -> dict[str, Any]:
    flags = token if isinstance(token, dict) else {}
    if "__type" in flags:  # written before the token was known to be special
        flags = {"normalized": True, **flags}
    return {**flags, "content": content_of(token), "special": True}


def _special_tokens(options: dict[str, Any]) -> Iterator[Any]:
    for name, value in options.items():
        if name.endswith("_token") and isinstance(value, (str, dict)):
            yield value
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = options.get(name) or ()
        yield from more.values() if isinstance(more, dict) else more


def added_token(entry: dict[str, Any], token_id: int) -> Token:
    if entry.get("id", token_id) != token_id:
        raise CheckpointError(
            f"the added token {entry['content']!r} has id {entry['id']!r} in the tokenizer's files and {token_id} in "
            "Hugging Face's tokenizers; correct the file, or give token ids."
        )
    if len(entry["content"]) > MAX_CHARACTERS:
        raise CheckpointError(
            f"the added token {entry['content'][:40]!r}... has {len(entry['content'])} characters; at most "
            f"{MAX_CHARACTERS} are taken."
        )
    usual = {**FLAGS, "normalized": not entry.get("special", False)}
    flags = {name: entry.get(name, value) for name, value in usual.items()}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise CheckpointError(f"the added token {entry!r} has flags that are not true or false.")
    return {"id": token_id, "content": entry["content"], **flags}
