"""The tokenizer of a checkpoint, equal to Hugging Face's `tokenizers`."""

import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, overload

from ..errors import CheckpointError, RequestError, TinyGPTError
from ..fields import BOOLEAN, read_field
from ..weights.files import StoredTokenizer, how_to_replace
from . import TextEncoder
from .files import MALFORMED, checked_spec, read_tokenizer, spec_of
from .gpt2_bpe import (
    AddedTokenSplitter,
    ByteLevelBPE,
    ByteTokens,
    UnlikeGPT2,
    no_token_for,
    read_prepared,
    template_ids,
    token_to_bytes,
)
from .stream import ByteDetokenizer, Detokenizer, PrefixDetokenizer

logger = logging.getLogger(__name__)


class CharacterTokenizer(ByteTokens):
    """A token for each character, as in nanoGPT's smallest models."""

    special_ids = frozenset()
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
            raise no_token_for(lacking)
        return [self._ids[character] for character in text]

    def token(self, token_id: int) -> str | None:
        return self.token_bytes(token_id).decode("utf-8", "surrogatepass") or None


def is_characters(spec: dict[str, Any]) -> bool:
    model = spec["model"]
    ours = spec_of(StoredTokenizer("characters", {}))
    steps = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    is_split = all(spec[step] == ours[step] for step in steps)
    return is_split and model["type"] == "WordLevel" and all(len(token) == 1 for token in model["vocab"])


_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class SpelledTokens:
    """Tokens that a package joins to a text. vocab: their ids, by their spelling."""

    def __init__(self, vocab: Mapping[str, int], spec: dict[str, Any]):
        self._tokens = {token_id: token for token, token_id in vocab.items()}
        self._is_byte_level = (spec["decoder"] or {}).get("type") == "ByteLevel"
        self.vocab_size = 1 + max(self._tokens)
        self.num_tokens = len(vocab)
        self.eos_token_id = vocab.get(spec["eos_token"])
        self.special_ids = frozenset(entry["id"] for entry in spec["added_tokens"] if entry["special"])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        raise NotImplementedError

    def token(self, token_id: int) -> str | None:
        return self._tokens.get(token_id)

    def ids_from(self, first: int) -> list[int]:
        return sorted(token_id for token_id in self._tokens if token_id >= first)

    def token_bytes(self, token_id: int) -> bytes:
        if not self._is_byte_level:
            raise RequestError(
                "the tokens of this checkpoint's tokenizer are not bytes, as guided texts need them."
            )
        return token_to_bytes(self.token(token_id) or "")

    def detokenizer(self, skip_special_tokens: bool) -> ByteDetokenizer | PrefixDetokenizer:
        skipped = self.special_ids if skip_special_tokens else ()
        if self._is_byte_level:
            return ByteDetokenizer(lambda i: b"" if i in skipped else self.token_bytes(i))
        decode = partial(self.decode, skip_special_tokens=skip_special_tokens)
        return PrefixDetokenizer(decode, lambda i: i not in skipped and self._is_plain(i))

    def _is_plain(self, token_id: int) -> bool:
        return not _BYTE_TOKEN.fullmatch(self.token(token_id) or "<0x00>")


class LibraryTokenizer(SpelledTokens):
    """A tokenizer of `read_tokenizer` on `tokenizers`. Raise CheckpointError if it is refused."""

    def __init__(self, spec: dict[str, Any]):
        import tokenizers  # slow, and not needed for GPT-2

        own = {name: part for name, part in spec.items() if name != "eos_token"}  # unknown to the library
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(own))
        except Exception as error:  # the library raises nothing narrower
            why = f"is refused by the package tokenizers: {error}. Token ids still work."
            raise CheckpointError(f"the tokenizer of this checkpoint {why}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._lock = threading.Lock()
        super().__init__(self._tokenizer.get_vocab(), spec)

    def encode(self, text: str, split_special_tokens: bool) -> list[int]:
        try:
            with self._lock:  # the switch is a state of the tokenizer
                self._tokenizer.encode_special_tokens = split_special_tokens
                return self._tokenizer.encode(text).ids
        except Exception as error:  # as above
            why = f"cannot encode the text: {error}. Give token ids."
            raise RequestError(f"the tokenizer of this checkpoint {why}") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [token_id for token_id in ids if token_id < self.vocab_size]  # the library takes 32 bits
        return self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)


class SentencePieceTokenizer(SpelledTokens):
    """A sentencepiece model of `read_tokenizer`, run by its own package."""

    def __init__(self, spec: dict[str, Any]):
        model = spec["model"]
        added = {entry["content"]: entry["id"] for entry in spec["added_tokens"]}
        super().__init__(model["vocab"] | added, spec)
        self._processor = model["processor"]
        self._clean = model["clean"]
        self._ends_once = model["ends_once"]
        self._added_ids = {*added.values()}
        self._splitter = AddedTokenSplitter(spec["added_tokens"])
        self._before, self._after = template_ids(spec["post_processor"])
        if self._after == [self.eos_token_id]:
            logger.warning(
                f"the tokenizer ends each text with {spec['eos_token']!r}, as transformers' does, and the model writes "
                'after that: "add_eos_token": false in tokenizer_config.json leaves it out'
            )

    def encode(self, text: str, split_special_tokens: bool) -> list[int]:
        ids = list(self._before)
        for part in self._splitter.split(text, split_special_tokens):
            ids += self._processor.encode(self._clean(part)) if isinstance(part, str) else [part]
        is_ended = self._ends_once and ids[-1:] == self._after
        return ids if is_ended else ids + self._after

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        skipped = self.special_ids if skip_special_tokens else ()
        known = [token_id for token_id in ids if token_id in self._tokens and token_id not in skipped]
        parts = []
        for is_added, run in groupby(known, self._added_ids.__contains__):
            run = [*run]
            parts += map(self._tokens.get, run) if is_added else [self._processor.decode(run)]
        return "".join(parts)


TokenizerModel = ByteLevelBPE | CharacterTokenizer | LibraryTokenizer | SentencePieceTokenizer


class Tokenizer(TextEncoder):
    """Text to token ids and back. len() is the number of tokens.

    vocab_size: the highest token id + 1. eos_token_id: may be None. special_ids: what skip_special_tokens leaves out.
    split_special_tokens: the default of `encode`.
    """

    def __init__(self, model: TokenizerModel, split_special_tokens: bool = False):
        self._model = model
        self.split_special_tokens = split_special_tokens
        self.vocab_size = model.vocab_size
        self.special_ids = model.special_ids
        self.eos_token_id = model.eos_token_id

    def __len__(self) -> int:
        return self._model.num_tokens

    def __repr__(self) -> str:
        return f"Tokenizer({len(self)} tokens, eos_token_id={self.eos_token_id})"

    @classmethod
    def from_folder(cls, path: str | Path, split_special_tokens: bool = False) -> "Tokenizer":
        """Load a folder's tokenizer: GPT-2's BPE on tiktoken, sentencepiece on its package, all else on `tokenizers`.

        Raise NoTokenizerError if none runs, CheckpointError if it is damaged.
        """
        folder = Path(path)
        return cls._made_of(
            lambda: read_prepared(folder) or _load(read_tokenizer(folder)), path, split_special_tokens
        )

    @classmethod
    def from_spec(
        cls, spec: dict[str, Any], path: str | Path, split_special_tokens: bool = False
    ) -> "Tokenizer":
        """Return a tokenizer from a tokenizer.json, found in `path`."""
        return cls._made_of(lambda: _load(checked_spec(spec, Path(path), {})), path, split_special_tokens)

    @classmethod
    def _made_of(
        cls, load: Callable[[], TokenizerModel], path: str | Path, split_special_tokens: bool
    ) -> "Tokenizer":
        read_field("split_special_tokens", split_special_tokens, BOOLEAN)
        try:
            return cls(load(), split_special_tokens)
        except TinyGPTError:
            raise
        except MALFORMED as error:
            why = f"do not have the form of a tokenizer ({error!r}); {how_to_replace(Path(path), 'them')}"
            raise CheckpointError(f"the tokenizer's files in {path} {why}, or give token ids.") from error

    def encode(self, text: str, split_special_tokens: bool | None = None) -> list[int]:
        """Return the token ids of a text, with the tokenizer's tokens around it.

        split_special_tokens: read special tokens as plain text.
        Raise RequestError unless text is a string without lone surrogates.
        """
        if split_special_tokens is None:
            split_special_tokens = self.split_special_tokens
        read_field("split_special_tokens", split_special_tokens, BOOLEAN)
        if not isinstance(text, str):
            raise RequestError(f"a text to encode must be a string; {type(text).__name__} was given.")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            half = f"a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}"
            raise RequestError(f"the text holds {half}, which is half of a character; remove it.") from None
        return self._model.encode(text, split_special_tokens)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return a text; invalid UTF-8 becomes U+FFFD, an unknown id nothing. Raise RequestError."""
        ids = list(ids)
        for position, token_id in enumerate(ids):
            _check_token_id(token_id, position)
        return self._model.decode(ids, skip_special_tokens)

    def batch_decode(
        self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        """Return the text of each sequence of token ids, as `decode` does."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def tokenize(self, text: str, split_special_tokens: bool | None = None) -> list[str]:
        return [str(self._model.token(token_id)) for token_id in self.encode(text, split_special_tokens)]

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str | None]: ...
    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> str | list[str | None] | None:
        """Return tokens as the vocabulary spells them, such as "Ġonce"; None for an unknown id. Raise RequestError."""
        if isinstance(ids, Iterable):
            return [*map(self.convert_ids_to_tokens, ids)]
        _check_token_id(ids, 0)
        return self._model.token(ids)

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token, as the vocabulary spells it."""
        return {str(self._model.token(token_id)): token_id for token_id in self.ids_from(0)}

    @property
    def eos_token(self) -> str | None:
        """The end-of-text token, or None."""
        return None if self.eos_token_id is None else self._model.token(self.eos_token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, none for an unknown id. Raise RequestError if tokens are not bytes."""
        _check_token_id(token_id, 0)
        return self._model.token_bytes(token_id)

    def ids_from(self, first: int) -> list[int]:
        return self._model.ids_from(first)

    def pieces(self, token_ids: Sequence[int], text: str | None = None) -> list[str]:
        """Return the part of the ids' text that each completes: joined, they are the text.

        A special token has its name if the text has it, as in a prompt.
        """
        stream = self.detokenizer()
        left = self.decode(token_ids) if text is None else text
        pieces = []
        for i, token_id in enumerate(token_ids, 1):
            piece = stream.push(token_id) + (stream.finish() if i == len(token_ids) else "")
            if token_id in self.special_ids:
                held, name, _ = left.partition(self.decode([token_id]))  # held: half a character before it
                if name and not held.strip("\ufffd"):
                    piece, stream = held + name, self.detokenizer()
            pieces.append(left[: len(piece)])  # a stop string cuts the text
            left = left[len(piece) :]
        return pieces

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a new stream: `push` ids, then `finish`."""
        return self._model.detokenizer(skip_special_tokens)


def _load(spec: dict[str, Any]) -> TokenizerModel:
    if spec["model"]["type"] == "sentencepiece":
        return SentencePieceTokenizer(spec)
    if is_characters(spec):
        return CharacterTokenizer(spec)
    try:
        return ByteLevelBPE(spec)
    except UnlikeGPT2:
        return LibraryTokenizer(spec)


def _check_token_id(token_id: Any, position: int) -> None:
    if isinstance(token_id, bool) or not hasattr(token_id, "__index__") or token_id < 0:
        raise RequestError(
            f"a token id must be a whole number from 0; {token_id!r} was given at position {position}."
        )
