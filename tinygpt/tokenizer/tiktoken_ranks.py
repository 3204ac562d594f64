"""From a list of merged pairs to the ranks of joined tokens that tiktoken merges by.

Hugging Face's `tokenizers` merges the adjacent *pair* with the lowest rank; tiktoken merges the adjacent
tokens whose *joined bytes* have the lowest rank, and takes a whole word that is a token without merging.
The two agree on every text when each ranked token is what merging its own characters ends in: parts of a
text merge as they would alone until a merge crosses their border, so a token that does not come out of its
own characters comes out of no text, and one that does comes out by one pair only.
"""

from collections.abc import Mapping, Sequence

NUM_BYTES = 256
Pair = tuple[str, str]


class UnorderedMerges(Exception):
    """A merge stands before the one that makes a part of it; no trainer writes such a list."""


def token_ranks(pairs: Sequence[Pair], alphabet: Mapping[str, int]) -> dict[str, int]:
    """The tokens that merging can produce, each with its rank: 256 and the place in `pairs` of the merge that does.

    `alphabet` holds the single characters that merging starts from, and their bytes, which are their ranks. Where a
    pair is repeated its last place counts, as in `tokenizers`. Raises UnorderedMerges.
    """
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
