"""Scheduler: a step's sequences and their numbers of tokens, the slots of the KV cache, and shared prefixes.

Keys and values of a position depend on the tokens up to it alone, bit for bit: prompts that begin alike share them.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable

from ..kernels.backend import no_op
from ..llm_args import LOGIT_ROWS
from .sequence import Sequence, common_prefix
from .step import Chunk

# Tokens that waiting for another sequence's prompt must save. Waiting costs a step, as long as 9 (alone) to 60 (with 31
# others) tokens of a prompt: measured on the demo checkpoint.
WORTH_WAITING = 16

# Ids of virtual tokens from here down belong to one request: no later prompt begins with them.
SINGLE_USE_IDS = -(2**31)

CopyPositions = Callable[[int, int, int, int], None]  # source_slot, target_slot, start, stop


class SlotTable:
    """`max_num_seqs` slots for running sequences, and `prefix_cache_seqs` more for the tokens of finished ones."""

    def __init__(self, max_num_seqs: int, prefix_cache_seqs: int):
        self.prefix_cache_seqs = prefix_cache_seqs
        self._empty = list(range(max_num_seqs + prefix_cache_seqs))[::-1]
        self.prefixes: dict[int, list[int]] = {}  # tokens by slot, the least recently used first

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self.prefixes) - self.prefix_cache_seqs

    def take(self, prompt: list[int]) -> tuple[int, int]:
        """Return a free slot, and how many of the prompt's tokens it holds."""
        for slot, token_ids in self.prefixes.items():
            if len(token_ids) < len(prompt) and prompt[: len(token_ids)] == token_ids:
                del self.prefixes[slot]
                return slot, len(token_ids)
        return self._empty.pop(), 0

    def release(self, slot: int, token_ids: list[int]) -> None:
        """Take back a slot, and cache its tokens unless a cached prefix has them all."""
        cached = list(self.prefixes.items())
        covering = next((other for other, longer in cached if longer[: len(token_ids)] == token_ids), None)
        if not token_ids or token_ids[0] <= SINGLE_USE_IDS or covering is not None:
            self._empty.append(slot)
            if token_ids and covering is not None:
                self.touch(covering)
            return
        for other, shorter in cached:
            if token_ids[: len(shorter)] == shorter:
                self._evict(other)
        self.prefixes[slot] = token_ids
        if len(self.prefixes) > self.prefix_cache_seqs:
            self._evict(next(iter(self.prefixes)))

    def touch(self, slot: int) -> None:
        self.prefixes[slot] = self.prefixes.pop(slot)

    def _evict(self, slot: int) -> None:
        del self.prefixes[slot]
        self._empty.append(slot)


class Beginnings:
    """Running sequences in order of arrival, by the first id of their prefixes and by the first WORTH_WAITING."""

    def __init__(self, running: list[Sequence]):
        self._numbers: dict[Sequence, int] = {}
        self._sharing: dict[tuple[int, ...], list[tuple[Sequence, list[int]]]] = {}
        for sequence in running:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        ids = sequence.prefix_ids
        self._numbers[sequence] = len(self._numbers)
        for size in {min(size, len(ids)) for size in (1, WORTH_WAITING)}:
            self._sharing.setdefault(tuple(ids[:size]), []).append((sequence, ids))

    def earlier(self, sequence: Sequence, wanted: list[int]) -> list[tuple[int, Sequence]]:
        """Return each earlier sequence to copy from, or to wait for, and how many of the wanted ids it shares."""
        begun = self._sharing.get(tuple(wanted[:1]), ())
        near = self._sharing.get(tuple(wanted[:WORTH_WAITING]), ())
        earlier = dict(near) | {other: ids for other, ids in begun if other.num_copyable_positions}
        own = self._numbers[sequence]
        earlier = {other: ids for other, ids in earlier.items() if self._numbers[other] < own}
        return [(_num_shared(wanted, other, ids), other) for other, ids in earlier.items()]


class Scheduler:
    """A free slot goes to the caller that holds the fewest, of equals to the first that waits.

    A sequence holds one slot of the KV cache from its first step to its last. For a caller without a slot, callers with
    several lose some: such a sequence is computed again in its next slot, to the same bits.
    max_num_tokens: new tokens in a step, at least as many as running sequences.
    prepare_slot(sequence): called when a sequence has entered its slot.
    """

    def __init__(
        self,
        slots: SlotTable,
        max_num_tokens: int,
        copy_positions: CopyPositions,
        prepare_slot: Callable[[Sequence], None] = no_op,
    ):
        self.max_num_tokens = max_num_tokens
        self._waiting: dict[object, deque[Sequence]] = {}  # by caller
        self.running: list[Sequence] = []  # in order of arrival in their slots
        self.slots = slots
        self._copy_positions = copy_positions
        self._prepare_slot = prepare_slot
        self._layer = 0  # that the last step began with
        # By waiting sequence: the sequence that computes its first tokens, and how many.
        self._prefix_sources: dict[Sequence, tuple[Sequence, int]] = {}
        self._beginnings: Beginnings | None = None  # of `running` as it is in this step

    def add(self, *sequences: Sequence) -> None:
        """Queue the sequences of a caller."""
        caller = object()
        for sequence in sequences:
            sequence.caller = caller
            self._waiting.setdefault(caller, deque()).append(sequence)

    @property
    def waiting(self) -> list[Sequence]:
        return list(itertools.chain.from_iterable(self._waiting.values()))

    def schedule(self) -> list[Chunk]:
        """Return the chunks of the next step: decoding sequences first, then prompts in order of arrival."""
        self._beginnings = None
        while self._waiting and self._admit_next():
            pass
        for sequence in [sequence for sequence in self.running if sequence.has_to_slide]:
            self._slide(sequence)
        chunks = [Chunk.of(sequence, 1) for sequence in self.running if sequence.num_uncached == 1]
        if len(chunks) < len(self.running):
            self._add_prompts(chunks)
        layers = {chunk.sequence.first_layer for chunk in chunks}  # a step begins with one, in turn
        self._layer = min(layers, default=0, key=lambda layer: (layer <= self._layer, layer))
        return [chunk for chunk in chunks if chunk.sequence.first_layer == self._layer]

    @property
    def finished(self) -> list[Sequence]:
        return [sequence for sequence in self.running if sequence.is_finished]

    def remove(self, sequence: Sequence) -> None:
        queue = self._waiting.get(sequence.caller, ())
        if sequence in queue:
            queue.remove(sequence)
            if not queue:
                del self._waiting[sequence.caller]
        elif sequence in self.running:
            self._copy_to_followers(sequence)
            self.running.remove(sequence)
            self._prefix_sources.pop(sequence, None)
            self.slots.release(sequence.slot, sequence.prefix_ids[: sequence.num_copyable_positions])
            sequence.slot = None

    def _add_prompts(self, chunks: list[Chunk]) -> None:
        budget = self.max_num_tokens - len(chunks)
        num_logits = LOGIT_ROWS
        for sequence in [s for s in self.running if s.num_uncached > 1]:
            if budget and not self._is_waiting_for_prefix(sequence):
                count = min(sequence.num_uncached, budget, sequence.max_count(num_logits))
                if count:
                    chunks.append(Chunk.of(sequence, count))
                    budget = budget - count
                    num_logits = num_logits - chunks[-1].num_part_logits

    def _admit_next(self) -> bool:
        """Admit a sequence, or all that run together, or make room. Return False if neither is possible."""
        held = Counter(sequence.caller for sequence in self.running)
        callers = itertools.islice(self._waiting, len(held) + 1)  # of these, one at least holds none
        caller = min(callers, key=lambda caller: held[caller])
        queue = self._waiting[caller]
        count = queue[0].num_together
        if count > self.slots.num_free:
            return not held[caller] and self._pause_one(held)
        for _ in range(count):
            self._admit(queue.popleft())
        if not queue:
            del self._waiting[caller]
        return True

    def _pause_one(self, held: Counter[object]) -> bool:
        """Take the slot of the caller's shortest sequence that holds most. Return False if none holds several."""
        followed = {other for other, _ in self._prefix_sources.values()}
        surplus = [s for s in self.running if held[s.caller] > 1 and s.can_pause and s not in followed]
        if surplus:
            paused = max(reversed(surplus), key=lambda s: (held[s.caller], -len(s)))
            paused.leave()
            self.remove(paused)
            self._waiting.setdefault(paused.caller, deque()).appendleft(paused)
            self._beginnings = None
        return bool(surplus)

    def _admit(self, sequence: Sequence) -> None:
        sequence.enter(*self.slots.take(sequence.prefix_ids[: sequence.max_prefix_tokens + 1]))
        self.running.append(sequence)  # first: if a copy fails, `remove` finds the slot
        if self._beginnings is not None:
            self._beginnings.add(sequence)
        self._prepare_slot(sequence)
        self._copy_longest_prefix(sequence)

    def _slide(self, sequence: Sequence) -> None:
        followers = self._copy_to_followers(sequence)
        sequence.slide()
        self._beginnings = None
        for follower in followers:
            self._copy_longest_prefix(follower)

    def _copy_longest_prefix(self, sequence: Sequence) -> None:
        """Copy the longest prefix, or wait for an earlier sequence that will have more."""
        wanted = sequence.prefix_ids[: sequence.max_prefix_tokens]
        self._beginnings = self._beginnings or Beginnings(self.running)
        running = self._beginnings.earlier(sequence, wanted)
        ready = [(min(count, other.num_copyable_positions), other.slot) for count, other in running]
        cached = [(common_prefix(wanted, token_ids), slot) for slot, token_ids in self.slots.prefixes.items()]
        num_ready, slot = max(ready + cached, default=(0, None))
        num_shared, other = max(running, key=lambda item: item[0], default=(0, None))
        if num_shared - max(num_ready, sequence.num_cached) >= WORTH_WAITING:
            self._prefix_sources[sequence] = other, num_shared
            return
        self._prefix_sources.pop(sequence, None)
        self._copy(slot, sequence, num_ready)
        if num_ready and (num_ready, slot) in cached:
            self.slots.touch(slot)

    def _is_waiting_for_prefix(self, sequence: Sequence) -> bool:
        if sequence in self._prefix_sources:
            other, count = self._prefix_sources[sequence]
            if other.slot is None or other.num_copyable_positions >= count:
                self._copy_longest_prefix(sequence)
        return sequence in self._prefix_sources

    def _copy_to_followers(self, sequence: Sequence) -> list[Sequence]:
        """Copy to waiting sequences, before a slot's content changes. Return those sequences."""
        followers = [follower for follower, (other, _) in self._prefix_sources.items() if other is sequence]
        for follower in followers:
            self._copy(
                sequence.slot,
                follower,
                min(sequence.num_copyable_positions, self._prefix_sources[follower][1]),
            )
        return followers

    def _copy(self, slot: int | None, sequence: Sequence, stop: int) -> None:
        if stop > sequence.num_cached:
            self._copy_positions(slot, sequence.slot, sequence.num_cached, stop)
            sequence.reuse(stop)


def _num_shared(wanted: list[int], other: Sequence, ids: list[int]) -> int:
    return min(common_prefix(wanted, ids), max(other.num_cached, len(other.prompt_token_ids)))
