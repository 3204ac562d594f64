"""Tokenizers of GPT-2's and of BLOOM's kind, in the form of a tokenizer.json."""

from collections.abc import Mapping, Sequence
from typing import Any

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
    """Whether a tokenizer is byte-level BPE that cuts texts into BLOOM's words, and puts nothing around them."""
    has_words = any(spec["pre_tokenizer"] == _blooms_pre_tokenizer(trims) for trims in (True, False))
    has_bytes = all((spec[name] or {}).get("type") in kinds for name, kinds in _AROUND_BLOOM.items())
    return has_words and has_bytes and spec["model"]["type"] == "BPE"


def _blooms_pre_tokenizer(trim_offsets: bool = True) -> dict[str, Any]:
    """trim_offsets: changes no token."""
    words = {"type": "Split", "pattern": {"Regex": _BLOOM_WORDS}, "behavior": "Isolated", "invert": False}
    byte_level = {**_BYTE_LEVEL, "trim_offsets": trim_offsets, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [words, byte_level]}
