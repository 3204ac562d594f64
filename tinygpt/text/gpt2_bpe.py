"""Byte-level BPE as GPT-2 has it, run by tiktoken.

A token's rank in tiktoken is its place in the merges file, its id in the model the row of wte. `tokenizers` merges the
adjacent *pair* with the lowest rank; tiktoken the tokens whose *joined bytes* have it, and takes a word that is a token
whole. They agree on a trainer's list: merging the characters of each token ends in it. Others run on `tokenizers`.
"""

import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, count, pairwise, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken

from ..errors import CheckpointError, RequestError
from ..weights.files import PREPARED_FILE, TOKENIZER_FILES, read_json, read_regular
from .files import MALFORMED, Token, added_token, read_tokenizer
from .stream import ByteDetokenizer

NUM_BYTES = 256
NEVER = 2**62  # the rank without a merge
Pair = tuple[str, str]


def token_ranks(pairs: Sequence[Pair], alphabet: Mapping[str, int]) -> dict[str, int]:
    """Return the rank of each token: NUM_BYTES + the position of the merge that makes it.

    alphabet: bytes of characters. Raise UnlikeGPT2 unless each merge joins earlier tokens, and no other crosses it.
    """
    ranks = {**alphabet, **dict(zip(map("".join, pairs), count(NUM_BYTES)))}
    parts = [np.fromiter(map(ranks.get, side, repeat(NEVER)), np.int64) for side in zip(*pairs, strict=True)]
    if not parts:
        return ranks
    left, right = parts  # (M,) each
    if (np.maximum(left, right) >= np.arange(NUM_BYTES, NUM_BYTES + len(pairs))).any() or _is_any_crossed(
        left, right
    ):
        raise UnlikeGPT2("its merges are not in a trainer's order")
    return ranks


def _is_any_crossed(left: np.ndarray, right: np.ndarray) -> bool:
    """Return whether a merge joins across the border of a pair before its two tokens are built.

    All merges walk back in time: x and y touch at the border, each used up at some rank. Of equal merges the leftmost
    goes first, hence < and <=.
    """
    num_ranks = NUM_BYTES + len(left)
    keys = left * num_ranks + right  # of merges
    by_key = np.argsort(keys)
    keys = keys[by_key]
    x, y = left, right  # (N,)
    left, right = (np.concatenate([np.zeros(NUM_BYTES, np.int64), part]) for part in (left, right))  # by rank
    x_used = y_used = np.arange(NUM_BYTES, num_ranks)
    while (goes_on := np.maximum(x, y) >= NUM_BYTES).any():
        x, y, x_used, y_used = (ranks[goes_on] for ranks in (x, y, x_used, y_used))
        is_x = x > y
        x_used = np.where(is_x, x, x_used)
        y_used = np.where(is_x, y_used, y)
        x = np.where(is_x, right[x], x)
        y = np.where(is_x, y, left[y])
        touching = x * num_ranks + y
        places = np.searchsorted(keys[:-1], touching)
        ranks = np.where(keys[places] == touching, by_key[places] + NUM_BYTES, NEVER)
        if ((ranks < x_used) & (ranks <= y_used)).any():
            return True
    return False


# GPT-2's pattern. Runs of white space, all at the end of a text, else all but the last character, go by the thousand:
# regex's stack is small.
WORDS = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++"
    r"|\s++\z|(?=\s\s)(?:\s{1000}(?=\s))*+(?:\s(?=\s))*+|\s"
)
# Parts that begin as a word does: a list of a million ids would hold the GIL for tenths of a second.
PARTS = re.compile(r".{65536}.*?\S(?= \S)|.+", re.DOTALL)

WHITE_SPACE = re.compile(r"\s*")
OTHER_OPTIONS = (
    "dropout",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "byte_fallback",
    "ignore_merges",
)
MAX_TEMPLATE = 1000  # tokens on either side of a text
MAX_ADDED = 20_000  # characters of added tokens, which `re` may all try at each place of a text
# GPT-2 writes an unprintable byte as a character from 256 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
_CHARACTERS = {byte: character for character, byte in _BYTES.items()}
# Bytes by character number; the last entry is for all further characters.
_NO_BYTE = -1
_BYTE_OF = np.full(max(map(ord, _BYTES)) + 2, _NO_BYTE, np.int16)
_BYTE_OF[[*map(ord, _BYTES)]] = [*_BYTES.values()]


class UnlikeGPT2(Exception):
    """Why a tokenizer does not run on tiktoken."""


def token_to_bytes(token: str) -> bytes:
    """Return a token's bytes; characters of no byte stand for themselves."""
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode("utf-8", errors="surrogatepass")


def tokens_to_bytes(tokens: Collection[str]) -> list[bytes]:
    numbers = np.frombuffer("".join(tokens).encode("utf-16-le", "surrogatepass"), "<u2")
    numbers_of_bytes = _BYTE_OF[np.minimum(numbers, len(_BYTE_OF) - 1)]
    if _NO_BYTE in numbers_of_bytes:  # a token in other characters
        return [*map(token_to_bytes, tokens)]
    data = numbers_of_bytes.astype(np.uint8).tobytes()
    return [data[start:stop] for start, stop in pairwise(accumulate(map(len, tokens), initial=0))]


def no_token_for(characters: Sequence[str]) -> RequestError:
    named = ", ".join(map(repr, characters[:10]))
    return RequestError(
        f"the tokenizer of this checkpoint has no token for {named}; leave it out of the text."
    )


class Vocabulary(NamedTuple):
    bytes_of: dict[int, bytes]
    id_of_rank: dict[int, int]  # of tiktoken's ranks that are tokens


def read_vocabulary(model: dict[str, Any]) -> Vocabulary:
    vocab = model["vocab"]
    alphabet = {character: byte for character, byte in _BYTES.items() if character in vocab}
    ranks = token_ranks(model["merges"], alphabet)
    bytes_of = dict(zip(vocab.values(), tokens_to_bytes(vocab), strict=True))
    return Vocabulary(bytes_of, dict(zip(ranks.values(), map(vocab.__getitem__, ranks), strict=True)))


class AddedTokenSplitter:
    """Splits at added tokens as `tokenizers`: normalized=False first, longest first."""

    def __init__(self, tokens: Iterable[Token]):
        self._by_content = {token["content"]: token for token in tokens}
        # re takes the first alternative that matches.
        contents = sorted(self._by_content, key=len, reverse=True)
        passes = [
            [c for c in contents if self._by_content[c]["normalized"] is flag] for flag in (False, True)
        ]
        self._patterns = [re.compile("|".join(map(re.escape, group))) for group in passes if group]

    def split(self, text: str, split_special_tokens: bool) -> list[str | int]:
        """Return ids of added tokens, and the non-empty strings between them.

        split_special_tokens: a special token stays text, and hides overlapped tokens of its pass.
        """
        parts: list[str | int] = [text] if text else []
        for pattern in self._patterns:
            split = (
                self._split(pattern, p, split_special_tokens) if isinstance(p, str) else [p] for p in parts
            )
            parts = [*chain.from_iterable(split)]
        return parts

    def _split(self, pattern: re.Pattern, text: str, split_special_tokens: bool) -> Iterator[str | int]:
        start = 0
        for match in pattern.finditer(text):
            token = self._by_content[match.group()]
            if split_special_tokens and token["special"]:
                continue
            before = text[start : match.start()]
            if before := before.rstrip() if token["lstrip"] else before:
                yield before
            yield token["id"]
            start = WHITE_SPACE.match(text, match.end()).end() if token["rstrip"] else match.end()
        if start < len(text):
            yield text[start:]


class ByteTokens:
    _bytes: dict[int, bytes]
    special_ids: frozenset[int]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        token_bytes = self._visible_bytes if skip_special_tokens else self.token_bytes
        return b"".join(map(token_bytes, ids)).decode("utf-8", errors="replace")

    def detokenizer(self, skip_special_tokens: bool) -> ByteDetokenizer:
        return ByteDetokenizer(self._visible_bytes if skip_special_tokens else self.token_bytes)

    def ids_from(self, first: int) -> list[int]:
        return sorted(token_id for token_id in self._bytes if token_id >= first)

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes.get(token_id, b"")

    def _visible_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self.special_ids else self.token_bytes(token_id)


class ByteLevelBPE(ByteTokens):
    """A tokenizer on tiktoken. Raise UnlikeGPT2 for other kinds."""

    def __init__(self, spec: dict[str, Any], vocabulary: Vocabulary | None = None):
        _check_pipeline(spec)
        added = spec["added_tokens"]
        self._bytes, self._id_of_rank = vocabulary or read_vocabulary(spec["model"])
        self._encoding = _encoding(self._bytes, self._id_of_rank)
        self._added = {token["id"]: token["content"] for token in added}
        self._bytes |= {token_id: token_to_bytes(content) for token_id, content in self._added.items()}
        self.vocab_size = 1 + max(self._bytes)
        self.num_tokens = len(self._bytes)
        self.eos_token_id = next(
            (token["id"] for token in added if token["content"] == spec["eos_token"]), None
        )
        self.special_ids = frozenset(token["id"] for token in added if token["special"])
        self._splitter = AddedTokenSplitter(added)
        self._prefix_space = spec["pre_tokenizer"]["add_prefix_space"]
        self._before, self._after = template_ids(spec.get("post_processor"))

    def token(self, token_id: int) -> str | None:
        if token_id in self._added or token_id not in self._bytes:
            return self._added.get(token_id)
        return "".join(map(_CHARACTERS.__getitem__, self._bytes[token_id]))

    def encode(self, text: str, split_special_tokens: bool) -> list[int]:
        ids = list(self._before)
        for part in self._splitter.split(text, split_special_tokens):
            ids += self._encode_plain(part) if isinstance(part, str) else [part]
        return ids + self._after

    def _encode_plain(self, text: str) -> list[int]:
        if self._prefix_space and not text.startswith(" "):
            text = " " + text
        parts = map(self._encoding.encode_ordinary, PARTS.findall(text))
        ids = [id for part in parts for id in map(self._id_of_rank.get, part)]
        if None in ids:
            lacking = sorted({c for c in text if not self._id_of_rank.keys() >= {*c.encode()}})
            raise no_token_for(lacking)
        return ids


def _encoding(bytes_of: Mapping[int, bytes], id_of_rank: Mapping[int, int]) -> tiktoken.Encoding:
    ranks = {bytes([byte]): byte for byte in range(NUM_BYTES)}
    ranks |= zip(map(bytes_of.__getitem__, id_of_rank.values()), id_of_rank, strict=True)
    return tiktoken.Encoding("checkpoint", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={})


def _check_pipeline(spec: dict[str, Any]) -> None:
    model = spec["model"]
    is_like_gpt2 = (
        model["type"] == "BPE"
        and (not model.get("unk_token") or model["vocab"].keys() >= _BYTES.keys())
        and not any(model.get(name) for name in OTHER_OPTIONS)
        and spec.get("normalizer") is None
        and _type(spec.get("pre_tokenizer")) == _type(spec.get("decoder")) == "ByteLevel"
        and spec["pre_tokenizer"].get("use_regex", True)
        and not any(
            entry[flag] for entry in spec["added_tokens"] for flag in ("single_word", "lstrip", "rstrip")
        )
        and sum(len(entry["content"]) for entry in spec["added_tokens"]) <= MAX_ADDED
    )
    if not is_like_gpt2:
        raise UnlikeGPT2("its steps are not GPT-2's")


def template_ids(processor: dict[str, Any] | None) -> list[list[int]]:
    """Return the ids before and after a text. Raise UnlikeGPT2 for other processors."""
    if _type(processor) in (None, "ByteLevel"):
        return [[], []]
    if _type(processor) != "TemplateProcessing":
        raise UnlikeGPT2(f"its post_processor is {_type(processor)}")
    sides: list[list[int]] = [[], []]
    is_after = False
    for piece in processor["single"]:
        if "Sequence" in piece:
            is_after = True
            continue
        ids = processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise ValueError(f"the template's ids of {piece['SpecialToken']['id']!r} are no token ids")
        if len(sides[is_after]) + len(ids) > MAX_TEMPLATE:
            raise CheckpointError(
                f"the tokenizer's post_processor puts more than {MAX_TEMPLATE} tokens around a text."
            )
        sides[is_after] += ids
    return sides


def _type(part: dict[str, Any] | None) -> str | None:
    return part["type"] if part else None


# The vocabulary as `convert` prepares it in PREPARED_FILE, with a digest of the tokenizer's files.

FORMAT = b"tinygpt tokenizer 1\n"
NUMBERS = "<u4"

logger = logging.getLogger(__name__)


def write_prepared(folder: Path) -> None:
    """Write PREPARED_FILE if the tokenizer files in `folder` are valid and like GPT-2's."""
    try:
        spec = read_tokenizer(folder)
        ByteLevelBPE(spec)
        vocabulary = _as_json(read_vocabulary(spec["model"]))
    except (CheckpointError, UnlikeGPT2, *MALFORMED):
        return
    payload = json.dumps({"spec": {**spec, "model": {"type": "BPE"}}, **vocabulary}).encode()
    (folder / PREPARED_FILE).write_bytes(_digest(folder, payload) + b"\n" + payload)


def read_prepared(folder: Path) -> ByteLevelBPE | None:
    """Return the tokenizer, or None if the other files must be read."""
    file = folder / PREPARED_FILE
    try:
        digest, _, payload = read_regular(file).partition(b"\n")
        if digest == _digest(folder, payload):
            content = read_json(payload)
            return ByteLevelBPE(_checked(content["spec"]), _vocabulary(content))
        logger.debug("%s does not belong to the files in its folder, which are read instead", file)
    except FileNotFoundError:  # of most checkpoints
        pass
    except (OSError, CheckpointError, UnlikeGPT2, *MALFORMED) as error:
        logger.debug("%s is not used (%r)", file, error)
    return None


def _digest(folder: Path, payload: bytes) -> bytes:
    digest = hashlib.sha256(FORMAT)
    for path in (folder / name for name in TOKENIZER_FILES):
        if path.exists():
            content = read_regular(path)
            digest.update(f"{path.name} {len(content)}\n".encode() + content)
    digest.update(payload)
    return digest.hexdigest().encode()


def _checked(spec: dict[str, Any]) -> dict[str, Any]:
    """Check as the readers of other files."""
    for entry in spec["added_tokens"]:
        if type(entry["id"]) is not int or entry["id"] < 0:
            raise ValueError(f"{entry['id']!r} is no token id")
        added_token(entry, entry["id"])
    return spec


def _as_json(vocabulary: Vocabulary) -> dict[str, str]:
    bytes_of, id_of_rank = vocabulary
    ids = [*id_of_rank.values(), *(bytes_of.keys() - {*id_of_rank.values()})]  # ranked tokens first
    tokens = [*map(bytes_of.__getitem__, ids)]
    numbers = {"ranks": [*id_of_rank], "ids": ids, "lengths": [*map(len, tokens)]}
    arrays = {name: np.array(values, NUMBERS).tobytes() for name, values in numbers.items()}
    return {name: data.hex() for name, data in {**arrays, "tokens": b"".join(tokens)}.items()}


def _vocabulary(content: dict[str, str]) -> Vocabulary:
    """Raise ValueError for a damaged vocabulary: tiktoken would end the process."""
    ranks, ids, lengths = (
        np.frombuffer(bytes.fromhex(content[name]), NUMBERS).tolist() for name in ("ranks", "ids", "lengths")
    )
    data = bytes.fromhex(content["tokens"])
    tokens = [data[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]
    bytes_of = dict(zip(ids, tokens, strict=True))
    id_of_rank = dict(zip(ranks, ids, strict=False))
    is_right = (len(bytes_of), len(id_of_rank), len(data)) == (len(ids), len(ranks), sum(lengths)) and all(
        bytes_of[token_id] == bytes([rank]) for rank, token_id in id_of_rank.items() if rank < NUM_BYTES
    )
    if not is_right:
        raise ValueError("it holds no vocabulary")
    return Vocabulary(bytes_of, id_of_rank)
