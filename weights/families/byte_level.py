"""Tokenizers of GPT-2's kind, in the form of a tokenizer.json."""

from collections.abc import Mapping, Sequence
from typing import Any

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def byte_level_tokenizer(
    vocab: Mapping[str, int],
    merges: Sequence[str],
    added_tokens: Sequence[Mapping[str, Any]],
    post_processor: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
        "added_tokens": added_tokens,
        "normalizer": None,
        "pre_tokenizer": dict(_BYTE_LEVEL),
        "post_processor": post_processor,
        "decoder": dict(_BYTE_LEVEL),
    }
