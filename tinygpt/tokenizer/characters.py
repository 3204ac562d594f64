"""A token for each character, as in nanoGPT's smallest models."""

from collections.abc import Sequence
from typing import Any

from tinygpt.errors import RequestError
from tinygpt.tokenizer.detokenizer import ByteDetokenizer


class CharacterTokenizer:
    """Runs a tokenizer whose words are single characters, and which `is_characters` recognises."""

    special_ids: frozenset[int] = frozenset()
    eos_token_id = None  # texts end by their length

    def __init__(self, spec: dict[str, Any]):
        self._ids: dict[str, int] = spec["model"]["vocab"]
        self._bytes = {
            token_id: character.encode("utf-8", "surrogatepass") for character, token_id in self._ids.items()
        }
        self.vocab_size = 1 + max(self._bytes)
        self.num_tokens = len(self._bytes)

    def encode(self, text: str, split_special_tokens: bool) -> list[int]:
        lacking = sorted(set(text) - self._ids.keys())
        if lacking:
            raise RequestError(
                f"the tokenizer of this checkpoint has no token for {', '.join(map(repr, lacking[:10]))}; leave such "
                "characters out of the text."
            )
        return [self._ids[character] for character in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer(self.token_bytes)

    def ids_from(self, first: int) -> list[int]:
        return sorted(token_id for token_id in self._bytes if token_id >= first)

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes.get(token_id, b"")


def is_characters(spec: dict[str, Any]) -> bool:
    """Whether the words of a tokenizer are single characters, and nothing is done to a text but to look them up."""
    model, splitter = spec["model"], spec["pre_tokenizer"] or {}
    nothing_else = not (spec["added_tokens"] or spec["normalizer"] or spec["post_processor"])
    return (
        model["type"] == "WordLevel"
        and nothing_else
        and (splitter.get("type"), splitter.get("behavior")) == ("Split", "Isolated")
        and splitter.get("pattern") == {"Regex": r"[\s\S]"}
        and (spec["decoder"] or {}).get("type") == "Fuse"
        and all(len(character) == 1 for character in model["vocab"])
    )
