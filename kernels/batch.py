"""The arrays of a step. Prefill, chunked prefill and decode differ in `seq_starts` alone."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

NO_EMBEDS = np.empty((0, 0), np.float32)


@dataclass(frozen=True)
class Batch:
    """N new tokens of S sequences, end to end. Integers are int32."""

    token_ids: np.ndarray  # (N,)
    positions: np.ndarray  # (N,)    in the sequence, from 0
    seq_starts: np.ndarray  # (S+1,)  sequence s has tokens seq_starts[s]:seq_starts[s+1]
    slots: np.ndarray  # (S,)    slot of the KV cache
    context_lens: np.ndarray  # (S,)    positions in the cache after this step
    logit_rows: np.ndarray  # (R,)    tokens whose logits are wanted
    embeds: np.ndarray  # (E, C)  float32; token id -1-j stands for row j

    @classmethod
    def of(
        cls,
        chunks: Seq[Seq[int]],
        starts: Seq[int],
        slots: Seq[int],
        logits_of: str | Seq[int] = "last",
        embeds: np.ndarray = NO_EMBEDS,
    ) -> "Batch":
        """Lay the next tokens of each sequence, chunks[s] from position starts[s], end to end.

        logits_of: "all" tokens, the "last" of each sequence, or a count of last tokens for each sequence
        """
        starts = np.array(starts, np.int32)  # (S,)
        if all(len(chunk) == 1 for chunk in chunks):  # decoding needs no array for each sequence
            seq_starts = np.arange(len(chunks) + 1, dtype=np.int32)
            context_lens = starts + np.int32(1)
            token_ids = np.array([chunk[0] for chunk in chunks], np.int32)
            positions = starts
        else:
            lens = np.array([len(chunk) for chunk in chunks], np.int32)
            seq_starts = _bounds(lens)
            context_lens = starts + lens
            token_ids = np.concatenate([np.asarray(chunk, np.int32) for chunk in chunks])
            positions = _runs(starts, lens)
        if logits_of == "all":
            logit_rows = np.arange(seq_starts[-1], dtype=np.int32)
        elif logits_of == "last" or all(count == 1 for count in logits_of):
            logit_rows = seq_starts[1:] - np.int32(1)
        else:
            counts = np.array(logits_of, np.int32)  # (S,)
            logit_rows = _runs(seq_starts[1:] - counts, counts)
        return cls(
            token_ids, positions, seq_starts, np.array(slots, np.int32), context_lens, logit_rows, embeds
        )

    def next_step(self, token_ids: np.ndarray) -> "Batch":
        """Return the decode step of these tokens (S,), with 0 for -1."""
        context_lens = self.context_lens + np.int32(1)
        return replace(
            self, token_ids=np.maximum(token_ids, 0), positions=self.context_lens, context_lens=context_lens
        )

    @property
    def token_slots(self) -> np.ndarray:
        return np.repeat(self.slots, np.diff(self.seq_starts))


def query_tiles(seq_starts: np.ndarray, size: int) -> np.ndarray:
    """Cut sequences' new tokens into runs of up to `size`. Return the bounds (tiles + 1,)."""
    starts, stops = seq_starts[:-1], seq_starts[1:]
    if stops[-1] == starts.size:  # one token each, as in decoding
        return seq_starts
    runs = [np.arange(start, stop, size) for start, stop in zip(starts, stops, strict=True)]
    return np.concatenate([*runs, seq_starts[-1:]])


def _bounds(lens: np.ndarray) -> np.ndarray:
    bounds = np.zeros(lens.size + 1, np.int32)
    np.cumsum(lens, out=bounds[1:])
    return bounds


def _runs(firsts: np.ndarray, lens: np.ndarray) -> np.ndarray:
    bounds = _bounds(lens)
    return np.arange(bounds[-1], dtype=np.int32) + np.repeat(firsts - bounds[:-1], lens)
