"""Undamaged files of tokenizers: a few merges, in every form that checkpoints have them."""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from tinygpt.tokenizer.prepared import FORMAT, PREPARED_FILE, write_prepared

MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("r", "e"), ("Ġ", "o"), ("Ġo", "f"), ("1", "2"), ("Ã", "ħ")]
OPTIONS = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "bos_token": "<|endoftext|>"}
OPTIONS |= {"add_bos_token": False, "unk_token": {"content": "<|endoftext|>", "lstrip": False}, "model_max_length": 12}
DECODER = {"added_tokens_decoder": {"264": {"content": "<|endoftext|>", "special": True, "normalized": False}}}


def pair(vocab: str, merges: str) -> dict[str, bytes]:
    return {
        vocab: to_json(_vocab()),
        merges: ("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in MERGES)).encode(),
        "tokenizer_config.json": to_json(OPTIONS),
        "special_tokens_map.json": to_json({"eos_token": "<|endoftext|>", "additional_special_tokens": ["<a1>"]}),
        "added_tokens.json": to_json({"<|endoftext|>": 264, "<a1>": 265}),
    }


def tokenizer_json() -> dict[str, bytes]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": True, "normalized": False}
    spec = {
        "version": "1.0",
        "added_tokens": [
            {"id": 264, "content": "<|endoftext|>", "special": True, **flags},
            {"id": 265, "content": "then", "special": False, **flags},
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "unk_token": None, "vocab": _vocab(), "merges": [f"{a} {b}" for a, b in MERGES]},
    }
    return {"tokenizer.json": to_json(spec), "tokenizer_config.json": to_json(DECODER)}


def prepared() -> dict[str, bytes]:
    """A tokenizer.json, and what `convert` makes of it."""
    with tempfile.TemporaryDirectory() as name:
        for file, data in tokenizer_json().items():
            (Path(name) / file).write_bytes(data)
        write_prepared(Path(name))
        return {**tokenizer_json(), PREPARED_FILE: (Path(name) / PREPARED_FILE).read_bytes()}


def prepared_digest(payload: bytes) -> bytes:
    """What has to stand before the payload of a prepared tokenizer, beside the files of `tokenizer_json`."""
    digest = hashlib.sha256(FORMAT)
    for file, data in tokenizer_json().items():
        digest.update(f"{file} {len(data)}\n".encode() + data)
    digest.update(payload)
    return digest.hexdigest().encode()


def vocab_txt() -> dict[str, bytes]:
    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "the", "##me", "##re", "of", "12", "日", "本", "th", "##en"]
    return {
        "vocab.txt": "\n".join(words).encode() + b"\n",
        "tokenizer_config.json": to_json({"do_lower_case": True, "model_max_length": 12}),
    }


def unigram() -> dict[str, bytes]:
    pieces = [["<unk>", 0.0], *([f"<0x{byte:02X}>", -9.0] for byte in range(256)), ["▁", -2.0], ["▁the", -1.5]]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    spec = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": metaspace,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, metaspace]},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": True},
    }
    return {"tokenizer.json": to_json(spec)}


def _vocab() -> dict[str, int]:
    return {token: i for i, token in enumerate([*_alphabet(), *map("".join, MERGES)])}


def _alphabet() -> list[str]:
    """GPT-2's characters for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]


def to_json(value: Any) -> bytes:
    return json.dumps(value).encode()
