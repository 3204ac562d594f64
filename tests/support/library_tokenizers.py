"""Tokenizers of Hugging Face's library, made by hand, written as files and loaded by us: it is the specification."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from support.recorded import MISSING
from tinygpt.text.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def bpe(merges=(), tokens=(), alphabet=ALPHABET, **model) -> Library:
    """A byte-level BPE with these merges, and more tokens that no merge makes."""
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*alphabet, *map("".join, merges), *tokens]))}
    library = Library(models.BPE(vocab=vocab, merges=list(merges), **model))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


def save(library: Library, folder: Path, **files) -> Tokenizer:
    """The library's tokenizer, loaded by us from the tokenizer.json it writes."""
    library.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        write(folder, f"{name}.json", content)
    return Tokenizer.from_folder(folder)


def write(folder: Path, name: str, content) -> None:
    text = content if isinstance(content, str | bytes) else json.dumps(content, ensure_ascii=False)
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def write_pair(library: Library, folder: Path, vocab="vocab.json", merges="merges.txt", **files) -> None:
    """The library's model as GPT-2's two files, and other files beside them."""
    model = json.loads(library.to_str())["model"]
    write(folder, vocab, model["vocab"])
    write(folder, merges, "#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in model["merges"]))
    for name, content in files.items():
        write(folder, f"{name}.json", content)


def assert_equal(ours: Tokenizer, library: Library, text: str) -> None:
    """The same ids, with special tokens in the text as tokens and as plain text, and the same texts of them."""
    for split_special_tokens in (False, True):
        library.encode_special_tokens = split_special_tokens
        ids = library.encode(text).ids
        assert ours.encode(text, split_special_tokens) == ids
        assert ours.tokenize(text, split_special_tokens) == [*map(library.id_to_token, ids)]
        assert ours.decode(ids) == library.decode(ids, skip_special_tokens=False)
        assert ours.decode(ids, skip_special_tokens=True) == library.decode(ids, skip_special_tokens=True)


def hugging_face(folder: Path) -> Library:
    """What transformers makes of a folder of GPT-2's files."""
    transformers = pytest.importorskip("transformers", reason=MISSING)
    return transformers.GPT2TokenizerFast.from_pretrained(folder).backend_tokenizer


def changed(library: Library, **steps) -> Library:
    for name, step in steps.items():
        setattr(library, name, step)
    return library


def with_digits(library: Library) -> Library:
    return changed(
        library, pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits(), library.pre_tokenizer])
    )


def unigram() -> Library:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁ab", "日", "日本"]
    scores = [(piece, -float(i)) for i, piece in enumerate(pieces)]
    library = Library(models.Unigram(scores, unk_id=0, byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    library.add_special_tokens(["<s>"])
    return library


def word_piece() -> Library:
    pieces = ["[UNK]", "[CLS]", "[SEP]", "a", "b", "##a", "##b", ".", "'", "日", "本", "##."]
    library = Library(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    return library
