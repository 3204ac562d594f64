"""Tokenizers in the form of a tokenizer.json: byte-level BPE of GPT-2 and BLOOM, also of GGUF files, and characters."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, NoTokenizerError, shown

# kinds of a token in GGUF
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
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
    if any(
        len(character) != 1 or type(token_id) is not int or token_id < 0
        for character, token_id in ids.items()
    ):
        raise CheckpointError(f"{place} must give each character a whole number from 0.")
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"[\s\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": dict(ids), "unk_token": "[UNK]"},
    }


def _is_gguf_tokenizer(about: Mapping[str, Any]) -> bool:
    tokens = about["tokens"]
    ends = [about.get(name, 0) for name in ("bos_token_id", "eos_token_id")]
    lists = [(tokens, str), (about.get("merges", []), str), (about.get("token_type", []), int)]
    return (
        all(
            isinstance(values, list) and all(type(value) is kind for value in values)
            for values, kind in lists
        )
        and len(about.get("token_type", tokens)) == len(tokens)
        and all(type(end) is int and 0 <= end < len(tokens) for end in ends)
    )


def gguf_tokenizer(about: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the tokenizer of a GGUF file, from its keys after "tokenizer.ggml.". Raise CheckpointError."""
    if not _is_gguf_tokenizer(about):
        raise CheckpointError(f"{path} has a damaged tokenizer: download it again, or give token ids.")
    if about.get("model") != "gpt2" or about.get("pre", "default") not in ("gpt-2", "default", "bloom"):
        kind = f"{shown(about.get('model'))}, {shown(about.get('pre'))}"
        raise NoTokenizerError(f"{path} has a tokenizer {kind}, which is not implemented: give token ids.")
    tokens = about["tokens"]
    kinds = about.get("token_type") or [NORMAL] * len(tokens)
    used = [
        (i, token, kind) for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED
    ]
    begin = about.get("bos_token_id") if about.get("add_bos_token") else None
    end = about.get("eos_token_id")
    added = [
        {"id": i, "content": token, "special": kind == CONTROL, "normalized": False}
        for i, token, kind in used
        if kind in (CONTROL, USER_DEFINED)
    ]
    start = None if begin is None else _beginning_with(tokens[begin], begin)
    ids = {token: i for i, token, _ in used}
    if twice := [token for i, token, _ in used if ids[token] != i]:
        raise NoTokenizerError(f"{path} has two tokens {shown(twice[0])}: give token ids.")
    spec = byte_level_tokenizer(ids, about.get("merges") or [], added, start, about.get("pre") == "bloom")
    return spec if end is None else {**spec, "eos_token": tokens[end]}


def _beginning_with(token: str, token_id: int) -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }
