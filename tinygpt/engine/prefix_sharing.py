"""PrefixSharing: what prompts have in common with other sequences, ended or running, is copied and not computed.

Only sequences of equal cache salts share, because a prompt that is read faster tells that another began like it.
"""

from collections.abc import Callable
from typing import NamedTuple

from tinygpt.engine.kv_slots import SlotTable, common_prefix
from tinygpt.request.sequence import Sequence

# Tokens that waiting for another's prompt must save. It costs the one that waits a step, and a step of decoding
# takes as long as 9 (alone) to 60 (beside 31 others) tokens of a prompt do: measured on the demo checkpoint.
WORTH_WAITING = 16

CopyPositions = Callable[[int, int, int, int], None]  # source_slot, target_slot, start, stop


class Awaited(NamedTuple):
    """A sequence that is about to compute the first `count` tokens, with which another begins too."""

    sequence: Sequence
    count: int


class PrefixSharing:
    """Copies common prefixes between slots, and knows which sequences wait for one that another is computing."""

    def __init__(self, slots: SlotTable, copy_positions: CopyPositions):
        self._slots = slots
        self._copy_positions = copy_positions
        self._awaited: dict[Sequence, Awaited] = {}  # by the sequence that waits

    def share(self, sequence: Sequence, earlier: list[Sequence]) -> None:
        """Copy what another slot holds of the prompt, or wait for a sequence that is about to compute more of it.

        earlier: the running sequences that arrived before this one, for which alone it may wait.
        """
        wanted = sequence.context_token_ids[: sequence.num_reusable]
        cache_salt = sequence.cache_salt
        running = [(_num_shared(wanted, s), s) for s in earlier if s.cache_salt == cache_salt]
        ready = [(min(count, s.num_cached), s.slot) for count, s in running]
        kept = [(common_prefix(wanted, token_ids), slot) for slot, token_ids in self._slots.kept(cache_salt)]
        num_ready, slot = max(ready + kept, default=(0, None))
        num_shared, other = max(running, key=lambda item: item[0], default=(0, None))
        if num_shared - max(num_ready, sequence.num_cached) >= WORTH_WAITING:
            self._awaited[sequence] = Awaited(other, num_shared)
            return
        self._awaited.pop(sequence, None)
        self._copy(slot, sequence, num_ready)
        if (num_ready, slot) in kept:
            self._slots.touch(slot)

    def is_waiting(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Whether another of the running sequences is still to compute what this one begins with too."""
        awaited = self._awaited.get(sequence)
        if awaited is None:
            return False
        if awaited.sequence.slot is None or awaited.sequence.num_cached >= awaited.count:
            self.share(sequence, running[: running.index(sequence)])
        return sequence in self._awaited

    def give_followers(self, sequence: Sequence, num_ready: int) -> list[Sequence]:
        """Copy, before a slot's content changes, what others wait for, as far as it is ready; those that wait."""
        followers = [s for s, awaited in self._awaited.items() if awaited.sequence is sequence]
        for follower in followers:
            self._copy(sequence.slot, follower, min(num_ready, self._awaited[follower].count))
        return followers

    def forget(self, sequence: Sequence) -> None:
        """The sequence leaves its slot, and waits no more."""
        self._awaited.pop(sequence, None)

    def _copy(self, slot: int | None, sequence: Sequence, stop: int) -> None:
        """Give `sequence` the positions up to `stop` of another slot, as far as it lacks them."""
        if stop > sequence.num_cached:
            self._copy_positions(slot, sequence.slot, sequence.num_cached, stop)
            sequence.reuse(stop)


def _num_shared(wanted: list[int], other: Sequence) -> int:
    """How many of these tokens `other` begins with: cached, or in its prompt and so about to be."""
    count = common_prefix(wanted, other.context_token_ids)
    return min(count, max(other.num_cached, len(other.prompt_token_ids)))
