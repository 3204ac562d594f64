"""Batch: the arrays of one step. Prefill, chunked prefill and decode differ only in `seq_starts`."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Batch:
    """N new tokens of S sequences, laid end to end: no padding and no mask, ever. All arrays are int32."""

    token_ids: np.ndarray  # (N,)
    positions: np.ndarray  # (N,)    position of each token in its sequence, from 0
    seq_starts: np.ndarray  # (S+1,)  tokens of sequence s: seq_starts[s]:seq_starts[s+1]
    rows: np.ndarray  # (S,)    the sequence's row in the KV cache
    context_lens: np.ndarray  # (S,)    positions of the sequence that are cached once this step is written
    logit_rows: np.ndarray  # (R,)    indices among the N tokens whose logits are wanted

    @classmethod
    def of(
        cls,
        chunks: Seq[Seq[int]],
        starts: Seq[int],
        rows: Seq[int],
        logits_of: str | Seq[bool] = "last",
    ) -> "Batch":
        """Lay the next tokens of each sequence end to end.

        chunks[s] are the new tokens of sequence s, starts[s] the position of the first of them, rows[s]
        its cache row. `logits_of` is "all" (every token), "last" (each sequence's last token), or a
        flag for each sequence: the last token of those that are true.
        """
        lens = np.array([len(chunk) for chunk in chunks], np.int32)  # (S,)
        seq_starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)  # (S+1,)
        positions = [np.arange(start, start + n) for start, n in zip(starts, lens, strict=True)]
        if isinstance(logits_of, str):
            last = seq_starts[1:] - 1
            logit_rows = np.arange(seq_starts[-1]) if logits_of == "all" else last
        else:
            logit_rows = (seq_starts[1:] - 1)[np.asarray(logits_of, bool)]
        return cls(
            token_ids=np.concatenate([np.asarray(c, np.int32) for c in chunks]),  # (N,)
            positions=np.concatenate(positions).astype(np.int32),  # (N,)
            seq_starts=seq_starts,
            rows=np.asarray(rows, np.int32),
            context_lens=(np.asarray(starts, np.int32) + lens).astype(np.int32),
            logit_rows=np.asarray(logit_rows, np.int32),
        )
