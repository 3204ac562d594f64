"""Tokenizers in the form of a tokenizer.json: byte-level BPE of GPT-2 and BLOOM, and single characters."""

from collections.abc import Mapping, Sequence
from typing import Any

from tinygpt.weights.errors import CheckpointError

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# BLOOM's words are of anything but white space and the punctuation of several scripts.
_BLOOM_WORDS = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
_AROUND_BLOOM = {"normalizer": (None,), "post_processor": (None, "ByteLevel"), "decoder": ("ByteLevel",)}


def byte_level_tokenizer(
    vocab: Mapping[str, int],
    merges: Sequence[str],
    added_tokens: Sequence[Mapping[str, Any]],
    post_processor: Mapping[str, Any] | None = None,
    cuts_as_bloom: bool = False,
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
        "added_tokens": added_tokens,
        "normalizer": None,
        "pre_tokenizer": _blooms_pre_tokenizer() if cuts_as_bloom else dict(_BYTE_LEVEL),
        "post_processor": post_processor,
        "decoder": dict(_BYTE_LEVEL),
    }


def is_blooms_kind(spec: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer is byte-level BPE of BLOOM's words, with nothing around a text."""
    has_words = any(spec["pre_tokenizer"] == _blooms_pre_tokenizer(trims) for trims in (True, False))
    has_bytes = all((spec[name] or {}).get("type") in kinds for name, kinds in _AROUND_BLOOM.items())
    return has_words and has_bytes and spec["model"]["type"] == "BPE"


def _blooms_pre_tokenizer(trim_offsets: bool = True) -> dict[str, Any]:
    """trim_offsets: changes no token."""
    words = {"type": "Split", "pattern": {"Regex": _BLOOM_WORDS}, "behavior": "Isolated", "invert": False}
    byte_level = {**_BYTE_LEVEL, "trim_offsets": trim_offsets, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [words, byte_level]}


def character_tokenizer(ids: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the tokenizer whose characters have these ids. Raise CheckpointError, which names `place`."""
    if any(len(character) != 1 or type(token_id) is not int or token_id < 0 for character, token_id in ids.items()):
        raise CheckpointError(f"{place} must give each character a whole number from 0.")
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": dict(ids), "unk_token": "[UNK]"},
    }
