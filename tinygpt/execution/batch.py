"""Batch: the arrays of one step. Prefill, chunked prefill and decode differ only in `seq_starts`."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

NO_EMBEDS = np.empty((0, 0), np.float32)


@dataclass(frozen=True)
class Batch:
    """N new tokens of S sequences, laid end to end: no padding and no mask, ever. Integers are int32."""

    token_ids: np.ndarray  # (N,)
    positions: np.ndarray  # (N,)    position of each token in its sequence, from 0
    seq_starts: np.ndarray  # (S+1,)  tokens of sequence s: seq_starts[s]:seq_starts[s+1]
    slots: np.ndarray  # (S,)    the sequence's slot in the KV cache
    context_lens: np.ndarray  # (S,)    positions of the sequence that are cached once this step is written
    logit_rows: np.ndarray  # (R,)    indices among the N tokens whose logits are wanted
    embeds: np.ndarray  # (E, C)  float32; token id -1-j stands for row j in place of an embedding of the model's

    @classmethod
    def of(
        cls,
        chunks: Seq[Seq[int]],
        starts: Seq[int],
        slots: Seq[int],
        logits_of: str | Seq[int] = "last",
        embeds: np.ndarray = NO_EMBEDS,
    ) -> "Batch":
        """Lay the next tokens of each sequence end to end.

        chunks[s] are the new tokens of sequence s, starts[s] the position of the first of them, slots[s]
        its slot of the KV cache. `logits_of` is "all" (every token), "last" (each sequence's last token), or a count
        for each sequence: that many of its last tokens.
        """
        starts = np.array(starts, np.int32)  # (S,)
        if all(len(chunk) == 1 for chunk in chunks):  # decoding: no array for each of them
            seq_starts, context_lens = np.arange(len(chunks) + 1, dtype=np.int32), starts + np.int32(1)
            token_ids, positions = np.array([chunk[0] for chunk in chunks], np.int32), starts
        else:
            lens = np.array([len(chunk) for chunk in chunks], np.int32)  # (S,)
            seq_starts, context_lens = _bounds(lens), starts + lens  # (S+1,)
            token_ids = np.concatenate([np.asarray(chunk, np.int32) for chunk in chunks])  # (N,)
            positions = _runs(starts, lens)  # (N,)
        if logits_of == "all":
            logit_rows = np.arange(seq_starts[-1], dtype=np.int32)
        elif logits_of == "last" or all(count == 1 for count in logits_of):
            logit_rows = seq_starts[1:] - np.int32(1)
        else:
            counts = np.array(logits_of, np.int32)  # (S,)
            logit_rows = _runs(seq_starts[1:] - counts, counts)  # (R,)
        return cls(token_ids, positions, seq_starts, np.array(slots, np.int32), context_lens, logit_rows, embeds)

    def next_step(self, token_ids: np.ndarray) -> "Batch":
        """Of a decode step: the one after it, with the tokens (S,) that it chose.

        Where none could be chosen, the sequence goes on with token 0, and nobody looks at it.
        """
        context_lens = self.context_lens + np.int32(1)
        return replace(self, token_ids=np.maximum(token_ids, 0), positions=self.context_lens, context_lens=context_lens)


def _bounds(lens: np.ndarray) -> np.ndarray:
    """Where runs of these lengths begin, laid end to end, and where the last one ends."""
    bounds = np.zeros(lens.size + 1, np.int32)
    np.cumsum(lens, out=bounds[1:])
    return bounds


def _runs(firsts: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """firsts[i], firsts[i] + 1, ... for lens[i] numbers, each run behind the one before."""
    bounds = _bounds(lens)
    return np.arange(bounds[-1], dtype=np.int32) + np.repeat(firsts - bounds[:-1], lens)
