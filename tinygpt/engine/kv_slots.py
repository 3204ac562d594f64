"""SlotTable: the slots of the KV cache: which are taken, and which hold the tokens of a sequence that has ended.

Keys and values of a position depend on the tokens up to it and on nothing else, bit for bit, so they may be used again
wherever a prompt begins with the same tokens, and may know of them: where its cache salt is the same.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

from tinygpt.request.soft_prompts import SINGLE_USE_IDS


class Held(NamedTuple):
    """What is in a slot: these tokens' keys and values, for sequences of this cache salt."""

    token_ids: list[int]
    cache_salt: Hashable


class SlotTable:
    """`max_num_seqs` slots to take at once, and beside them up to `prefix_cache_seqs` that keep what they hold.

    The least recently used of the kept slots is emptied first, whatever its cache salt.
    """

    def __init__(self, max_num_seqs: int, prefix_cache_seqs: int):
        self.prefix_cache_seqs = prefix_cache_seqs
        self._empty = list(range(max_num_seqs + prefix_cache_seqs))[::-1]
        self._kept: dict[int, Held] = {}  # by slot, the least recently used first

    @property
    def num_free(self) -> int:
        """Slots that can be taken."""
        return len(self._empty) + len(self._kept) - self.prefix_cache_seqs

    def kept(self, cache_salt: Hashable) -> Iterator[tuple[int, list[int]]]:
        """Each slot that is kept for this cache salt, and the token ids it holds."""
        return ((slot, held.token_ids) for slot, held in self._kept.items() if held.cache_salt == cache_salt)

    def take(self, prompt: list[int], cache_salt: Hashable) -> tuple[int, int]:
        """A slot for a prompt of token ids, and how many of its tokens the slot holds.

        That is a kept slot if the prompt goes on where it ends: nothing is lost then. Otherwise an empty one, of which
        there always is one, as long as `num_free` is not 0.
        """
        slot = next((slot for slot, token_ids in self.kept(cache_salt) if _goes_on(prompt, token_ids)), None)
        return (self._empty.pop(), 0) if slot is None else (slot, len(self._kept.pop(slot).token_ids))

    def release(self, slot: int, token_ids: list[int], cache_salt: Hashable) -> None:
        """Take back a slot that holds `token_ids`. Keep it if these can come again and no other holds them all."""
        if not token_ids or token_ids[0] <= SINGLE_USE_IDS:
            self._empty.append(slot)
            return
        covering = next((other for other, ids in self.kept(cache_salt) if ids[: len(token_ids)] == token_ids), None)
        if covering is not None:
            self.touch(covering)
            self._empty.append(slot)
            return
        for other in [other for other, ids in self.kept(cache_salt) if token_ids[: len(ids)] == ids]:
            self._forget(other)
        self._kept[slot] = Held(token_ids, cache_salt)
        while len(self._kept) > self.prefix_cache_seqs:
            self._forget(next(iter(self._kept)))

    def put(self, token_ids: list[int], cache_salt: Hashable, write: Callable[[int], None]) -> None:
        """Have `write` fill a slot with what `token_ids` stand for, and keep it, as far as slots are kept at all."""
        if not self.prefix_cache_seqs:
            return
        if not self._empty:
            self._forget(next(iter(self._kept)))
        write(self._empty[-1])
        self.release(self._empty.pop(), token_ids, cache_salt)

    def find(self, token_ids: list[int], cache_salt: Hashable) -> tuple[int, int | None]:
        """How many of these tokens the kept slot holds that holds most of them, and that slot."""
        found = [(common_prefix(token_ids, held), slot) for slot, held in self.kept(cache_salt)]
        return max(found, default=(0, None))

    def touch(self, slot: int) -> None:
        """Note that a kept slot was of use."""
        self._kept[slot] = self._kept.pop(slot)

    def _forget(self, slot: int) -> None:
        del self._kept[slot]
        self._empty.append(slot)


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens two lists have in common at their beginning."""
    if a[: len(b)] == b:
        return len(b)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _goes_on(token_ids: list[int], beginning: list[int]) -> bool:
    """Whether token_ids is `beginning` and at least one token more, which is left to compute."""
    return len(beginning) < len(token_ids) and token_ids[: len(beginning)] == beginning
