"""Scheduler: which sequences take part in a step, and with how many tokens. Knows nothing of the model."""

from collections import deque
from dataclasses import dataclass

from tinygpt.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """The next `count` tokens of a sequence."""

    sequence: Sequence
    count: int

    @property
    def is_sampled(self) -> bool:
        """Whether these reach the sequence's last token, so that the step yields the next one."""
        return self.count == self.sequence.num_uncached


class Scheduler:
    """First come, first served. A sequence holds one row of the KV cache from its first step to its last.

    max_num_seqs: rows of the cache; max_num_tokens: new tokens in a step. A long prompt is cut into chunks, so
    that the sequences already decoding wait for a bounded step, never for a whole prompt.
    """

    def __init__(self, max_num_seqs: int, max_num_tokens: int):
        self.max_num_tokens = max_num_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_rows = list(range(max_num_seqs))[::-1]

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step: decoding sequences first, then prompts in order of arrival."""
        while self.waiting and self._free_rows:
            sequence = self.waiting.popleft()
            sequence.row = self._free_rows.pop()
            self.running.append(sequence)
        chunks, budget = [], self.max_num_tokens
        for sequence in sorted(self.running, key=lambda s: s.num_uncached > 1):
            count = min(sequence.num_uncached, budget)
            if count:
                chunks.append(Chunk(sequence, count))
                budget -= count
        return chunks

    def finish_step(self) -> None:
        """Give back the rows of the sequences that have ended."""
        for sequence in [s for s in self.running if s.is_finished]:
            self._leave_row(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is; its row is free for the next one."""
        if sequence.row is not None:
            self._leave_row(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _leave_row(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free_rows.append(sequence.row)
        sequence.row = None
