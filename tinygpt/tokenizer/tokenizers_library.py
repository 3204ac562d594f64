"""Tokenizers of every other kind, run by the optional package `tokenizers`."""

import json
import re
import threading
from collections.abc import Sequence
from typing import Any

from tinygpt.errors import CheckpointError, NoTokenizerError, RequestError, how_to_install
from tinygpt.tokenizer.byte_level_bpe import token_to_bytes
from tinygpt.tokenizer.detokenizer import PrefixDetokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class LibraryTokenizer:
    """Runs a tokenizer that `read_tokenizer` read, as Hugging Face's library does.

    `reason` says why tiktoken cannot run it. Raises NoTokenizerError where the package is not installed, and
    CheckpointError where it refuses the tokenizer.
    """

    def __init__(self, spec: dict[str, Any], reason: str):
        try:
            import tokenizers
        except ImportError:
            raise NoTokenizerError(
                f"the tokenizer of this checkpoint is not byte-level BPE as GPT-2 has it: {reason}. The package "
                f"that runs it comes with: {how_to_install('tokenizers')}. Until then, token ids still work."
            ) from None
        own = {
            name: part for name, part in spec.items() if name != "eos_token"
        }  # the library refuses what it knows not
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(own))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(
                f"the tokenizer of this checkpoint is refused by the package tokenizers: {error}. Token ids still work."
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._lock = threading.Lock()
        self._is_byte_level = (spec["decoder"] or {}).get("type") == "ByteLevel"
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values())
        self.num_tokens = self._tokenizer.get_vocab_size()
        self.eos_token_id = self._tokenizer.token_to_id(spec["eos_token"] or "")
        self.special_ids = frozenset(entry["id"] for entry in spec["added_tokens"] if entry["special"])

    def encode(self, text: str, split_special_tokens: bool) -> list[int]:
        try:
            with self._lock:  # the library has the switch in the tokenizer, which several threads may be using
                self._tokenizer.encode_special_tokens = split_special_tokens
                return self._tokenizer.encode(text).ids
        except Exception as error:  # the library raises nothing narrower: a vocabulary without its unknown token, say
            raise RequestError(
                f"the tokenizer of this checkpoint cannot encode the text: {error}. Give token ids, or load the "
                "tokenizer with transformers and save it again."
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [token_id for token_id in ids if token_id < self.vocab_size]  # the library takes 32 bits at most
        return self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)

    def ids_from(self, first: int) -> list[int]:
        return sorted(token_id for token_id in self._tokenizer.get_vocab().values() if token_id >= first)

    def token_bytes(self, token_id: int) -> bytes:
        if not self._is_byte_level:
            raise RequestError(
                "the tokens of this checkpoint's tokenizer are not bytes, as guided texts need them: use a checkpoint "
                "with byte-level BPE, or leave out the guided field."
            )
        return token_to_bytes(self._tokenizer.id_to_token(token_id) or "")

    def detokenizer(self) -> PrefixDetokenizer:
        return PrefixDetokenizer(lambda ids: self.decode(ids, skip_special_tokens=True), self._is_plain)

    def _is_plain(self, token_id: int) -> bool:
        """Whether a token gives text, and not one byte of it."""
        if token_id >= self.vocab_size or token_id in self.special_ids:
            return False
        return not _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "<0x00>")
