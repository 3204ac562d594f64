"""Scheduler: which sequences take part in a step, and with how many tokens. Knows nothing of the model."""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tinygpt.engine.kv_slots import SlotTable, common_prefix
from tinygpt.engine_config import LOGIT_ROWS
from tinygpt.request.sequence import Sequence

# Tokens that waiting for another's prompt must save. It costs the one that waits a step, and a step of decoding
# takes as long as 9 (alone) to 60 (beside 31 others) tokens of a prompt do: measured on the demo checkpoint.
WORTH_WAITING = 16


class Chunk(NamedTuple):
    """The next `count` tokens of a sequence.

    is_sampled: whether these reach the sequence's last token, so that the step yields the next one.
    num_prompt_logits: how many of its last tokens have to have their logits computed for the prompt's own log
        probabilities.
    """

    sequence: Sequence
    count: int
    is_sampled: bool
    num_prompt_logits: int

    @classmethod
    def of(cls, sequence: Sequence, count: int) -> "Chunk":
        wanted, start = sequence.prompt_logprobs, sequence.num_cached
        num_prompt_logits = 0 if wanted is None else wanted.num_logits(start, start + count)
        return cls(sequence, count, count == sequence.num_uncached, num_prompt_logits)

    @property
    def num_logits(self) -> int:
        return max(int(self.is_sampled), self.num_prompt_logits)


class Scheduler:
    """First come, first served. A sequence holds one slot of the KV cache from its first step to its last.

    max_num_tokens: new tokens in a step, at least as many as sequences that run at once. A long prompt is cut into
    chunks, so that the sequences already decoding wait for a bounded step, never for a whole prompt.
    copy_positions(source_slot, target_slot, start, stop): copies keys and values at once. What a prompt has in common
    with another sequence, ended or running, is copied and not computed.
    write_prefix(sequence): puts the keys and values of its soft prompt, if it comes with some, into an empty slot.
    """

    def __init__(
        self,
        slots: SlotTable,
        max_num_tokens: int,
        copy_positions: Callable[[int, int, int, int], None],
        write_prefix: Callable[[Sequence], None] | None = None,
    ):
        self.max_num_tokens = max_num_tokens
        self.waiting: deque[Sequence] = deque()  # other threads extend it
        self.running: list[Sequence] = []  # in order of arrival
        self.slots = slots
        self._copy_positions = copy_positions
        self._write_prefix = write_prefix

    def add(self, *sequences: Sequence) -> None:
        """Queue sequences behind one another: beams hold slots while they wait for one another.

        Other threads may add at any time.
        """
        self.waiting.extend(sequences)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step: decoding sequences first, then prompts in order of arrival."""
        while self.waiting and self.slots.num_free:
            self._admit(self.waiting.popleft())
        for sequence in [sequence for sequence in self.running if sequence.has_to_slide]:
            self._slide(sequence)
        chunks = [Chunk.of(sequence, 1) for sequence in self.running if sequence.num_uncached == 1]
        if len(chunks) == len(self.running):
            return chunks
        budget, num_logits = self.max_num_tokens - len(chunks), LOGIT_ROWS
        for sequence in [s for s in self.running if s.num_uncached > 1]:
            if budget and not self._is_waiting(sequence):
                count = min(sequence.num_uncached, budget)
                if sequence.prompt_logprobs is not None:
                    count = min(count, sequence.prompt_logprobs.max_count(sequence.num_cached, num_logits))
                if count:
                    chunks.append(Chunk.of(sequence, count))
                    budget, num_logits = budget - count, num_logits - chunks[-1].num_prompt_logits
        return chunks

    @property
    def finished(self) -> list[Sequence]:
        """The running sequences that have ended, and are to be removed before the next step."""
        return [sequence for sequence in self.running if sequence.is_finished]

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; its slot is free for the next one."""
        if sequence.slot is not None:
            self._leave_slot(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _admit(self, sequence: Sequence) -> None:
        sequence.scheduled_time = time.perf_counter()
        sequence.slot, sequence.num_cached = self.slots.take(sequence.context_token_ids[: sequence.num_reusable + 1])
        if sequence.soft_prompt is not None and not sequence.num_cached:
            self._put_prefix(sequence)
        sequence.num_reused = sequence.num_cached
        self.running.append(sequence)
        self._share(sequence)

    def _put_prefix(self, sequence: Sequence) -> None:
        try:
            self._write_prefix(sequence)
        except BaseException:  # Ctrl-C among others: the sequence stays the next one
            self.slots.release(sequence.slot, [])
            sequence.slot = None
            self.waiting.appendleft(sequence)
            raise

    def _is_waiting(self, sequence: Sequence) -> bool:
        """Whether another sequence is still to compute what this one begins with too."""
        awaited = sequence.awaited
        if awaited is not None and (awaited.slot is None or awaited.num_cached >= sequence.num_awaited):
            self._share(sequence)
        return sequence.awaited is not None

    def _share(self, sequence: Sequence) -> None:
        """Copy what another slot holds of the prompt, or wait for a sequence that is about to compute more of it."""
        wanted = sequence.context_token_ids[: sequence.num_reusable]
        earlier = [(_num_shared(wanted, s), s) for s in self.running[: self.running.index(sequence)]]
        ready = [(min(count, s.num_cached), s.slot) for count, s in earlier]
        kept = [(common_prefix(wanted, token_ids), slot) for slot, token_ids in self.slots.kept]
        num_ready, slot = max(ready + kept, default=(0, None))
        num_shared, other = max(earlier, key=lambda item: item[0], default=(0, None))
        if num_shared - max(num_ready, sequence.num_cached) >= WORTH_WAITING:
            sequence.awaited, sequence.num_awaited = other, num_shared
            return
        sequence.awaited = None
        self._copy(slot, sequence, num_ready)
        if (num_ready, slot) in kept:
            self.slots.touch(slot)

    def _copy(self, slot: int | None, sequence: Sequence, stop: int) -> None:
        """Give `sequence` the positions up to `stop` of another slot, as far as it lacks them."""
        if stop > sequence.num_cached:
            self._copy_positions(slot, sequence.slot, sequence.num_cached, stop)
            sequence.num_reused += stop - sequence.num_cached
            sequence.num_cached = stop

    def _leave_slot(self, sequence: Sequence) -> None:
        # Numbers that are not finite may have spread to positions before their own. Where one has failed they have;
        # where a token has been chosen there are none; of a prompt that was not read to its end, nobody knows.
        self._give_followers(sequence, 0 if sequence.error else sequence.num_cached)
        num_kept = sequence.num_cached if sequence.new_token_ids and not sequence.error else 0
        self.running.remove(sequence)
        self.slots.release(sequence.slot, sequence.context_token_ids[:num_kept])
        sequence.slot = None

    def _slide(self, sequence: Sequence) -> None:
        followers = self._give_followers(sequence, sequence.num_cached)
        sequence.slide()
        for follower in followers:
            self._share(follower)

    def _give_followers(self, sequence: Sequence, num_ready: int) -> list[Sequence]:
        """Copy, before a slot's content changes, what others wait for, as far as it is ready; those that wait."""
        followers = [s for s in self.running if s.awaited is sequence]
        for follower in followers:
            self._copy(sequence.slot, follower, min(num_ready, follower.num_awaited))
        return followers


def _num_shared(wanted: list[int], other: Sequence) -> int:
    """How many of these tokens `other` begins with: cached, or in its prompt and so about to be."""
    count = common_prefix(wanted, other.context_token_ids)
    return min(count, max(other.num_cached, len(other.prompt_token_ids)))
