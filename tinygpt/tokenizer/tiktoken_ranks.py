"""From a list of merged pairs to the ranks of joined tokens that tiktoken merges by.

Hugging Face's `tokenizers` merges the adjacent *pair* with the lowest rank; tiktoken merges the adjacent
tokens whose *joined bytes* have the lowest rank, and takes a whole word that is a token without merging.
The two agree on every text when each ranked token is what merging its own characters ends in: parts of a
text merge as they would alone until a merge crosses their border, so a token that does not come out of its
own characters comes out of no text, and one that does comes out by one pair only.
"""

from collections.abc import Mapping, Sequence
from itertools import count, repeat

import numpy as np

NUM_BYTES = 256
NEVER = 2**62  # the rank of what no merge makes
NUM_SLOTS = 2**19  # a power of two, some ten times as many as there are merges
Pair = tuple[str, str]


class UnorderedMerges(Exception):
    """A merge stands before the one that makes a part of it; no trainer writes such a list."""


def token_ranks(pairs: Sequence[Pair], alphabet: Mapping[str, int]) -> dict[str, int]:
    """The tokens that merging can produce, each with its rank: 256 and the place in `pairs` of the merge that does.

    `alphabet` holds the single characters that merging starts from, and their bytes, which are their ranks. Where a
    pair is repeated its last place counts, as in `tokenizers`. Raises UnorderedMerges.
    """
    ranks = _ranks_of_a_trainers_list(pairs, alphabet)
    return _ranks_one_by_one(pairs, alphabet) if ranks is None else ranks


def _ranks_of_a_trainers_list(pairs: Sequence[Pair], alphabet: Mapping[str, int]) -> dict[str, int] | None:
    """The same in a tenth of the time, where each merge makes a token of earlier ones, and none is crossed.

    None for any other list. A trainer merges what it finds in texts, which it has merged so far: GPT-2's list is one.
    Of two pairs that make one token one is crossed, and a pair that is repeated counts where it stands last.
    """
    ranks = {**alphabet, **dict(zip(map("".join, pairs), count(NUM_BYTES)))}
    parts = [np.fromiter(map(ranks.get, side, repeat(NEVER)), np.int64) for side in zip(*pairs, strict=True)]
    if not parts:
        return ranks
    left, right = parts  # (M,) each
    if (np.maximum(left, right) >= np.arange(NUM_BYTES, NUM_BYTES + len(pairs))).any() or _is_any_crossed(left, right):
        return None
    return ranks


def _is_any_crossed(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether `_is_crossed` of any merge, for all walks at once, one step of each at a time.

    left, right (M,): the ranks of what each merge joins. Merges that come after the one that walks are known here too,
    and cross nothing: their ranks are too high.
    """
    merges = _MergeRanks(left, right)
    x, y = left, right  # (N,), of the walks that go on
    left, right = (np.concatenate([np.zeros(NUM_BYTES, np.int64), part]) for part in (left, right))  # by rank
    x_used = y_used = np.arange(NUM_BYTES, len(left))
    while (goes_on := np.maximum(x, y) >= NUM_BYTES).any():
        x, y, x_used, y_used = (ranks[goes_on] for ranks in (x, y, x_used, y_used))
        is_x = x > y
        x_used, y_used = np.where(is_x, x, x_used), np.where(is_x, y_used, y)
        x, y = np.where(is_x, right[x], x), np.where(is_x, y, left[y])
        ranks = merges.find(x, y)
        if ((ranks < x_used) & (ranks <= y_used)).any():
            return True
    return False


class _MergeRanks:
    """The ranks of merges by those of the two tokens that they join, for many pairs at once."""

    def __init__(self, left: np.ndarray, right: np.ndarray):
        self._num_ranks = NUM_BYTES + len(left)
        keys = left * self._num_ranks + right
        order = np.argsort(keys)
        self._keys, self._ranks = keys[order], order + NUM_BYTES
        self._may_be = np.zeros(NUM_SLOTS, bool)
        self._may_be[keys & (NUM_SLOTS - 1)] = True

    def find(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """The rank of the merge of each pair (N,), NEVER where there is none."""
        keys = left * self._num_ranks + right
        ranks = np.full(len(keys), NEVER)
        (hits,) = np.nonzero(self._may_be[keys & (NUM_SLOTS - 1)])  # a tenth: to search for all takes long
        places = np.searchsorted(self._keys[:-1], keys[hits])
        is_there = self._keys[places] == keys[hits]
        ranks[hits[is_there]] = self._ranks[places[is_there]]
        return ranks


def _ranks_one_by_one(pairs: Sequence[Pair], alphabet: Mapping[str, int]) -> dict[str, int]:
    """`token_ranks` of any list."""
    last = {pair: rank for rank, pair in enumerate(pairs, NUM_BYTES)}
    ranks = dict(alphabet)
    parts: list[tuple] = [()] * NUM_BYTES  # by rank: the ranks of the two tokens that are merged
    merges: dict[tuple[int, int], int] = {}  # the other way round
    awaited = set()
    for rank, pair in enumerate(pairs, NUM_BYTES):
        left, right = pair
        parts.append(part := (ranks.get(left), ranks.get(right)))
        if last[pair] != rank:
            continue
        if None in part:
            awaited |= {token for token in pair if token not in ranks}
            continue
        merges[part] = rank
        if (product := left + right) not in ranks and not _is_crossed(rank, parts, merges):
            ranks[product] = rank
    early = awaited & ranks.keys()
    if early:
        raise UnorderedMerges(f"the token {min(early)!r} is used by a merge before the merge that makes it")
    return ranks


def _is_crossed(merge: int, parts: Sequence[tuple[int, int]], merges: Mapping[tuple[int, int], int]) -> bool:
    """Whether some merge joins across the border of a pair while its two tokens are still being built.

    Walks back in time: x and y are the tokens that touch at the border, each used up at a rank of its own.
    Of equal merges the leftmost goes first, hence < for x and <= for y.
    """
    x, y = parts[merge]
    x_used = y_used = merge
    while x >= NUM_BYTES or y >= NUM_BYTES:
        if x > y:
            x_used, x = x, parts[x][1]
        else:
            y_used, y = y, parts[y][0]
        rank = merges.get((x, y))
        if rank is not None and rank < x_used and rank <= y_used:
            return True
    return False
