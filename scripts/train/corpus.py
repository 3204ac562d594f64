"""The corpus: a folder with train.txt.xz and val.txt, UTF-8, whose documents are set apart by <|endoftext|>."""

import json
import lzma
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinygpt.errors import TinyGPTError
from tinygpt.tokenizer.tokenizer import Tokenizer

END_OF_TEXT = "<|endoftext|>"
TRAIN, VALIDATION = "train.txt.xz", "val.txt"
# What a run needs of its corpus, kept so that resuming is quick.
TOKENS = "tokens.npz"


class CorpusError(TinyGPTError):
    """The corpus cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Tokens:
    """The corpus as token ids, documents joined by the end-of-text token. validation_bytes: of the file's text."""

    train: np.ndarray
    validation: np.ndarray
    validation_bytes: int


def check_folder(folder: Path) -> None:
    """CorpusError if the corpus' files are not there. Reads none of them."""
    missing = [name for name in (TRAIN, VALIDATION) if not (folder / name).is_file()]
    if missing:
        raise CorpusError(f"{folder} holds no {' and no '.join(missing)}: give the folder that holds both.")


def read_documents(path: Path) -> list[str]:
    """The documents of a text file, compressed or not. CorpusError if it is damaged or empty."""
    data = path.read_bytes()
    try:
        text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8")
    except (lzma.LZMAError, UnicodeDecodeError) as error:
        raise CorpusError(f"{path} is damaged ({error}): copy it again.") from error
    documents = [document for document in text.split(END_OF_TEXT) if document.strip()]
    if not documents:
        raise CorpusError(f"{path} holds no text: give a corpus that does.")
    return documents


def train_tokenizer(documents: Iterable[str], num_merges: int, folder: Path) -> int:
    """Write vocab.json and merges.txt of a byte-level BPE in GPT-2's form. Returns the size of its vocabulary.

    That is 256 bytes, then the merges in order (fewer than asked for where the text has no more), then end of text.
    """
    from tokenizers import Tokenizer as Trainable
    from tokenizers import models, pre_tokenizers, trainers

    trainable = Trainable(models.BPE())
    trainable.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + num_merges, initial_alphabet=alphabet, show_progress=False)
    trainable.train_from_iterator(documents, trainer)
    trainable.model.save(str(folder))
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    vocabulary[END_OF_TEXT] = len(vocabulary)
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    return len(vocabulary)


def encode(tokenizer: Tokenizer, documents: Iterable[str], end_of_text: int) -> np.ndarray:
    token_ids: list[int] = []
    for document in documents:
        token_ids += tokenizer.encode(document)
        token_ids.append(end_of_text)
    return np.array(token_ids[:-1], np.int32)


def prepare(corpus: Path, num_merges: int, folder: Path, state: Path, begin_with: Path | None = None) -> Tokens:
    """Encode the corpus, and keep the token ids in `state`.

    The tokenizer, which goes into `folder`, is that of the checkpoint `begin_with`, or else is trained.
    """
    train, validation = (read_documents(corpus / name) for name in (TRAIN, VALIDATION))
    if begin_with is None:
        vocab_size = train_tokenizer(train, num_merges, folder)
        if vocab_size < 257 + num_merges:
            print(f"{TRAIN} has {vocab_size - 257} merges, fewer than the {num_merges} asked for.", flush=True)
    else:
        for name in ("vocab.json", "merges.txt"):
            shutil.copyfile(begin_with / name, folder / name)
        vocab_size = len(json.loads((folder / "vocab.json").read_text(encoding="utf-8")))
    tokenizer = Tokenizer.from_folder(folder)
    ids = [encode(tokenizer, documents, vocab_size - 1) for documents in (train, validation)]
    tokens = Tokens(*ids, (corpus / VALIDATION).stat().st_size)
    np.savez(state / TOKENS, train=tokens.train, validation=tokens.validation, bytes=tokens.validation_bytes)
    return tokens


def load_tokens(state: Path) -> Tokens:
    """What `prepare` has kept."""
    with np.load(state / TOKENS) as kept:
        return Tokens(kept["train"], kept["validation"], int(kept["bytes"]))
