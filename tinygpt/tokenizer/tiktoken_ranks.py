"""From a list of merged pairs to the ranks of joined tokens that tiktoken merges by.

Hugging Face's `tokenizers` merges the adjacent *pair* with the lowest rank; tiktoken merges the adjacent
tokens whose *joined bytes* have the lowest rank, and takes a whole word that is a token without merging.
The two agree on every text when each ranked token is what merging its own characters ends in: parts of a
text merge as they would alone until a merge crosses their border, so a token that does not come out of its
own characters comes out of no text, and one that does comes out by one pair only.
"""

from collections.abc import Iterable, Sequence

Pair = tuple[str, str]


class UnorderedMerges(Exception):
    """A merge stands before the one that makes a part of it; no trainer writes such a list."""


def token_ranks(pairs: Sequence[Pair], alphabet: Iterable[str]) -> dict[str, int]:
    """The tokens that merging can produce, each with the rank (place in `pairs`) of the merge that does.

    `alphabet` holds the single characters that merging starts from; they have rank -1. Where a pair is
    repeated its last place counts, as in `tokenizers`. Raises UnorderedMerges.
    """
    rank_of = {pair: rank for rank, pair in enumerate(pairs)}
    ranks = dict.fromkeys(alphabet, -1)
    parts: dict[str, Pair] = {}
    awaited = set()
    for rank, pair in enumerate(pairs):
        left, right = pair
        if rank_of[pair] != rank:
            continue
        if left not in ranks or right not in ranks:
            awaited |= {token for token in pair if token not in ranks}
        elif (product := left + right) not in ranks and not _is_crossed(pair, rank_of, ranks, parts):
            ranks[product] = rank
            parts[product] = pair
    early = awaited & ranks.keys()
    if early:
        raise UnorderedMerges(f"the token {min(early)!r} is used by a merge before the merge that makes it")
    return ranks


def _is_crossed(pair: Pair, rank_of: dict[Pair, int], ranks: dict[str, int], parts: dict[str, Pair]) -> bool:
    """Whether some merge joins across the border of `pair` while its two tokens are still being built.

    Walks back in time: x and y are the tokens that touch at the border, each used up at a rank of its own.
    Of equal merges the leftmost goes first, hence < for x and <= for y.
    """
    x, y = pair
    x_used = y_used = rank_of[pair]
    x_rank, y_rank = ranks[x], ranks[y]
    while True:
        if x_rank > y_rank:
            x_used, x = x_rank, parts[x][1]
            x_rank = ranks[x]
        elif y_rank >= 0:
            y_used, y = y_rank, parts[y][0]
            y_rank = ranks[y]
        else:
            return False
        rank = rank_of.get((x, y))
        if rank is not None and rank < x_used and rank <= y_used:
            return True
