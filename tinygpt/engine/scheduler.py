"""Scheduler: which sequences take part in a step, and with how many tokens. Knows nothing of the model."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tinygpt.engine.kv_slots import SlotTable
from tinygpt.engine.prefix_sharing import CopyPositions, PrefixSharing
from tinygpt.engine_config import LOGIT_ROWS
from tinygpt.request.sequence import Sequence


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
    copy_positions(source_slot, target_slot, start, stop): copies keys and values at once.
    write_prefix(sequence): puts the keys and values of its soft prompt, if it comes with some, into its empty slot.
    """

    def __init__(
        self,
        slots: SlotTable,
        max_num_tokens: int,
        copy_positions: CopyPositions,
        write_prefix: Callable[[Sequence], None] | None = None,
    ):
        self.max_num_tokens = max_num_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.slots = slots
        self._sharing = PrefixSharing(slots, copy_positions)
        self._write_prefix = write_prefix

    def add(self, *sequences: Sequence) -> None:
        """Queue sequences one after another: beams hold slots while they wait for one another."""
        self.waiting.extend(sequences)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step: decoding sequences first, then prompts in order of arrival."""
        while self.waiting and self.slots.num_free:
            self._admit(self.waiting.popleft())
        for sequence in [sequence for sequence in self.running if sequence.has_to_slide]:
            self._slide(sequence)
        chunks = [Chunk.of(sequence, 1) for sequence in self.running if sequence.num_uncached == 1]
        if len(chunks) < len(self.running):
            self._add_prompts(chunks)
        return chunks

    @property
    def finished(self) -> list[Sequence]:
        """The running sequences that have ended, and are to be removed before the next step."""
        return [sequence for sequence in self.running if sequence.is_finished]

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; its slot is free for the next one. One that is unknown is no mistake."""
        if sequence in self.running:
            self._leave_slot(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _add_prompts(self, chunks: list[Chunk]) -> None:
        """Fill the step up with the prompts' next tokens, as far as tokens and rows of logits go."""
        budget, num_logits = self.max_num_tokens - len(chunks), LOGIT_ROWS
        for sequence in [s for s in self.running if s.num_uncached > 1]:
            if budget and not self._sharing.is_waiting(sequence, self.running):
                count = min(sequence.num_uncached, budget)
                if sequence.prompt_logprobs is not None:
                    count = min(count, sequence.prompt_logprobs.max_count(sequence.num_cached, num_logits))
                if count:
                    chunks.append(Chunk.of(sequence, count))
                    budget, num_logits = budget - count, num_logits - chunks[-1].num_prompt_logits

    def _admit(self, sequence: Sequence) -> None:
        beginning = sequence.context_token_ids[: sequence.num_reusable + 1]
        sequence.enter(*self.slots.take(beginning, sequence.cache_salt))
        if sequence.soft_prompt is not None and not sequence.num_cached:
            self._write_prefix(sequence)
        self.running.append(sequence)
        self._share(sequence)

    def _share(self, sequence: Sequence) -> None:
        self._sharing.share(sequence, self.running[: self.running.index(sequence)])

    def _leave_slot(self, sequence: Sequence) -> None:
        # Numbers that are not finite may have spread to positions before their own. Where one has failed they have;
        # where a token has been sampled there are none; of a prompt that was not read to its end, nobody knows.
        self._sharing.give_followers(sequence, 0 if sequence.error else sequence.num_cached)
        num_kept = sequence.num_cached if sequence.new_token_ids and not sequence.error else 0
        self.running.remove(sequence)
        self._sharing.forget(sequence)
        self.slots.release(sequence.slot, sequence.context_token_ids[:num_kept], sequence.cache_salt)
        sequence.leave()

    def _slide(self, sequence: Sequence) -> None:
        followers = self._sharing.give_followers(sequence, sequence.num_cached)
        sequence.slide()
        for follower in followers:
            self._share(follower)
