"""Chunk, the next tokens of a sequence, and Step, a forward pass over chunks and what their parts add to it."""

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..kernels.backend import NO_EMBEDS, Batch, Hooks
from .model_runner import ModelRunner
from .sampler import Sampler
from .sequence import Sequence

if TYPE_CHECKING:  # a plain request has none
    from .part import Part


class Chunk(NamedTuple):
    """The next `count` tokens of a sequence, from position `start` on."""

    sequence: Sequence
    start: int
    count: int
    reaches_end: bool  # whether they reach the sequence's last token
    num_part_logits: int  # of the last tokens, for the sequence's parts

    @classmethod
    def of(cls, sequence: Sequence, count: int) -> "Chunk":
        start = sequence.num_cached
        num_part_logits = sequence.num_part_logits(start, start + count)
        return cls(sequence, start, count, count == sequence.num_uncached, num_part_logits)

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def reads_prompt(self) -> bool:
        """Whether its tokens count as read: a search's count once."""
        return self.sequence.is_counted and not self.sequence.new_token_ids

    @property
    def is_due(self) -> bool:
        """Whether the sequence's next token follows."""
        return self.reaches_end and self.sequence.wants_token

    @property
    def is_decode(self) -> bool:
        """Whether one token is computed, for the next one alone."""
        return self.is_due and self.count == 1 and not self.num_part_logits

    @property
    def num_logits(self) -> int:
        return max(int(self.is_due), self.num_part_logits)


@dataclass(eq=False)
class Step:
    """A forward pass over the chunks.

    drafts: by i, tokens that may follow chunks[i]. look: sees the pass. chosen: each i for which a part chooses tokens.
    num_new: tokens after the first of each text.
    """

    chunks: list[Chunk]
    runner: ModelRunner
    sampler: Sampler
    drafts: dict[int, list[int]] = field(default_factory=dict)
    look: Hooks | None = None
    chosen: set[int] = field(default_factory=set)
    num_new: int = 0

    @cached_property
    def batch(self) -> Batch:
        token_ids = [chunk.sequence.next_token_ids(chunk.count) for chunk in self.chunks]
        embeds = _replace_virtual(self.chunks, token_ids)  # (E, C)
        for i, draft in self.drafts.items():
            token_ids[i] = token_ids[i] + draft
        starts = [chunk.start for chunk in self.chunks]
        slots = [chunk.sequence.slot for chunk in self.chunks]
        return Batch.of(token_ids, starts, slots, self._counts, embeds)

    @property
    def _counts(self) -> list[int]:
        return [chunk.num_logits + len(self.drafts.get(i, ())) for i, chunk in enumerate(self.chunks)]

    @cached_property
    def last_rows(self) -> list[int]:
        """For chunks[i], the row of logits after its last token; its draft's rows follow."""
        ends = itertools.accumulate(self._counts)
        return [end - 1 - len(self.drafts.get(i, ())) for i, end in enumerate(ends)]

    def rows_of(self, i: int, count: int) -> slice:
        """Return the rows of logits of the last `count` tokens of chunks[i]."""
        return slice(self.last_rows[i] + 1 - count, self.last_rows[i] + 1)

    def due(self) -> list[Sequence]:
        return [chunk.sequence for chunk in self.chunks if chunk.is_due]

    def drawn(self) -> list[int]:
        """Return each i whose sequence's next token no part chooses."""
        return [i for i, chunk in enumerate(self.chunks) if chunk.is_due and i not in self.chosen]

    def logits_of(self, logits: Any, numbers: Seq[int]) -> tuple[Any, list[Sequence]]:
        """Return the last row of logits (R, V) of each of these chunks, without a copy if it is all, and sequences."""
        rows = [self.last_rows[i] for i in numbers]
        sequences = [self.chunks[i].sequence for i in numbers]
        return logits if len(rows) == len(logits) else logits[rows], sequences

    def parts_by_class(self) -> "list[tuple[type[Part], dict[int, Part]]]":
        """Return the parts of the chunks by i, of each class, in the order of their turns."""
        by_class: dict[type[Part], dict[int, Part]] = {}
        for i, chunk in enumerate(self.chunks):
            for part in chunk.sequence.parts:
                by_class.setdefault(type(part), {})[i] = part
        return sorted(by_class.items(), key=lambda item: item[0].turn)


def num_after_first(sequences: Iterable[Sequence]) -> int:
    """Return the new tokens after the first of each text."""
    return sum(max(len(sequence.new_token_ids) - 1, 0) for sequence in sequences)


def _replace_virtual(chunks: Seq[Chunk], token_ids: list[list[int]]) -> np.ndarray:
    """Set the virtual tokens in token_ids to -1-j, for row j of the embeddings. Return these (E, C)."""
    rows_of_chunks, num_rows = [], 0
    for i, chunk in enumerate(chunks):
        virtual = chunk.sequence.sample.soft_prompt
        if virtual is None or chunk.start >= len(virtual):
            continue
        embeds = virtual.prompt.embeds[chunk.start : chunk.stop]
        token_ids[i] = [-1 - j for j in range(num_rows, num_rows + len(embeds))] + token_ids[i][len(embeds) :]
        rows_of_chunks.append(embeds)
        num_rows += len(embeds)
    return np.concatenate(rows_of_chunks) if rows_of_chunks else NO_EMBEDS
