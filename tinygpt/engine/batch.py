"""StepInput: a step's chunks and drafts as a Batch for the backend."""

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygpt.engine.scheduler import Chunk
from tinygpt.engine.sequence import Sequence
from tinygpt.kernels.batch import NO_EMBEDS, Batch


@dataclass(frozen=True)
class StepInput:
    """The chunks of a step as a batch, and the rows of their logits.

    drafts: by i, the tokens that were drafted to follow chunks[i]; they go through the model with it.
    last_rows: for chunks[i], the row of logits after its own last token; the rows of its draft follow.
    """

    chunks: list[Chunk]
    drafts: Mapping[int, list[int]]
    batch: Batch
    last_rows: list[int]

    @classmethod
    def of(cls, chunks: list[Chunk], drafts: Mapping[int, list[int]]) -> "StepInput":
        token_ids = [chunk.sequence.next_token_ids(chunk.count) for chunk in chunks]
        embeds = _replace_virtual(chunks, token_ids)  # (E, C)
        counts = [chunk.num_logits for chunk in chunks]
        for i, draft in drafts.items():
            token_ids[i], counts[i] = token_ids[i] + draft, counts[i] + len(draft)
        starts, slots = [c.sequence.num_cached for c in chunks], [c.sequence.slot for c in chunks]
        batch = Batch.of(token_ids, starts, slots, counts, embeds)
        last_rows = [end - 1 - len(drafts.get(i, ())) for i, end in enumerate(itertools.accumulate(counts))]
        return cls(chunks, drafts, batch, last_rows)

    def ends(self) -> list[tuple[int, Sequence]]:
        """Return the sequences whose next token is due, each with its row of logits."""
        pairs = zip(self.last_rows, self.chunks, strict=True)
        return [(row, chunk.sequence) for row, chunk in pairs if chunk.is_sampled]

    def prompt_rows(self, i: int) -> slice:
        """Return the rows of logits for the prompt log probabilities of chunks[i]."""
        return slice(self.last_rows[i] + 1 - self.chunks[i].num_prompt_logits, self.last_rows[i] + 1)


def rows_of(logits: Any, rows: Seq[int]) -> Any:
    """Return rows of the logits (R, V); all of them without a copy."""
    return logits if len(rows) == len(logits) else logits[rows]


def _replace_virtual(chunks: Seq[Chunk], token_ids: list[list[int]]) -> np.ndarray:
    """Set the virtual tokens in token_ids to -1-j, for row j of the embeddings. Return these (E, C).

    The keys and values of a prefix are in the cache before its sequence's first step, so it has none here.
    """
    parts, num_rows = [], 0
    for i, chunk in enumerate(chunks):
        virtual, start = chunk.sequence.soft_prompt, chunk.sequence.num_cached
        if virtual is None or start >= len(virtual):
            continue
        embeds = virtual.prompt.embeds[start : start + chunk.count]
        token_ids[i] = [-1 - j for j in range(num_rows, num_rows + len(embeds))] + token_ids[i][len(embeds) :]
        parts.append(embeds)
        num_rows += len(embeds)
    return np.concatenate(parts) if parts else NO_EMBEDS
