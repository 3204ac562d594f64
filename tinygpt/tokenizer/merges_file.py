"""merges.txt: pairs of tokens, and whether any of them are missing.

A vocabulary that was cut short is no JSON, but merges that were cut short are a list of merges: texts would become
other tokens than those that the model knows.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import chain, filterfalse
from pathlib import Path
from typing import Any

from tinygpt.errors import CheckpointError
from tinygpt.tokenizer.text_files import read_text
from tinygpt.weights.files import how_to_replace

END_OF_WORD = "</w>"
# A list counts as cut short where more tokens than FEW lack their merges, nearly all of those that none makes: people
# have written words and special tokens into vocabularies, most of which are not two others, and no merge ever made.
FEW, NEARLY_ALL = 16, 0.9
MAX_CHARACTERS = 256  # of a token that may lack its merge: GPT-2's longest has 128, and each of them is a place to cut

Pair = tuple[str, str]


def read_merges(path: Path, vocab: Mapping[str, int]) -> list[Pair]:
    """The pairs in a merges.txt. CheckpointError where a line is none, and where the last one is broken off."""
    text = read_text(path)
    lines = text.removesuffix("\n").split("\n")
    if lines[0].startswith("#version") or lines == [""]:
        del lines[0]
    if lines and not text.endswith("\n") and not _is_whole(lines[-1], vocab):
        raise CheckpointError(
            f"{path} was cut short: it ends in {lines[-1][:MAX_CHARACTERS]!r}, which is no whole merge; "
            f"{how_to_replace(path)}, or give token ids."
        )
    return pairs_of(lines, path)


def pairs_of(merges: list[Any], path: Path) -> list[Pair]:
    """Merges as pairs of tokens, from "left right" or [left, right]. Raises CheckpointError."""
    split = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
    pairs = [tuple(parts) if isinstance(parts, list) else () for parts in split]
    if set(map(len, pairs)) - {2} or not all(chain.from_iterable(pairs)):
        wrong = next(merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2 or not all(pair))
        raise CheckpointError(f"the merge {wrong!r} in {path} must be two tokens; {how_to_replace(path)}.")
    if set(map(type, chain.from_iterable(pairs))) - {str}:
        raise CheckpointError(f"the merges in {path} must be made of strings; {how_to_replace(path)}.")
    return pairs


def check_none_is_missing(path: Path, pairs: Collection[Pair], vocab: Mapping[str, int], added: Iterable[str]) -> None:
    """CheckpointError where tokens are left that the pairs of the file `path` should have made.

    A trainer makes every token of two others by a merge, but for single characters. added: tokens that need none.
    """
    num_longer = len(vocab) - [*map(len, vocab)].count(1)
    if num_longer - len(pairs) <= FEW:  # a quick look, as each makes one token
        return
    made = {*map("".join, pairs), *added}
    unmade = [token for token in filterfalse(made.__contains__, vocab) if len(token.removesuffix(END_OF_WORD)) > 1]
    lacking = [token for token in unmade if len(token) <= MAX_CHARACTERS and _is_two(token, vocab)]
    if len(lacking) > max(FEW, NEARLY_ALL * len(unmade)):
        raise CheckpointError(
            f"{path} seems to have been cut short: none of its {len(pairs)} merges makes {lacking[0]!r}, nor "
            f"{len(lacking) - 1} more tokens of the vocabulary; {how_to_replace(path)}, or give token ids. If it is "
            "whole, load the tokenizer with transformers and save it with save_pretrained, which writes a "
            "tokenizer.json."
        )


def _is_whole(line: str, vocab: Mapping[str, int]) -> bool:
    parts = line.split(" ")
    return len(parts) == 2 and vocab.keys() >= {*parts, line.replace(" ", "")}


def _is_two(token: str, vocab: Mapping[str, int]) -> bool:
    """Whether a merge could make the token of two others."""
    return any(token[:i] in vocab and token[i:] in vocab for i in range(1, len(token)))
