"""Tokenizers of one token a character, in the form of a tokenizer.json."""

from collections.abc import Mapping
from typing import Any

from tinygpt.weights.errors import CheckpointError


def character_tokenizer(ids: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The tokenizer whose characters have these ids. CheckpointError, which names `place`, for what are none."""
    if any(len(character) != 1 or type(token_id) is not int or token_id < 0 for character, token_id in ids.items()):
        raise CheckpointError(
            f"{place} must give each character a whole number from 0: copy it from the data set again."
        )
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": dict(ids), "unk_token": "[UNK]"},
    }
