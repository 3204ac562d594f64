"""Micro-batches: the tokens of a step in a few runs, so that each stage works on one while the next has the one before.

No run changes a bit of another's result: a prompt may be cut anywhere.
"""

import math
from itertools import pairwise

import numpy as np

from tinygpt.kernels.batch import Batch

# As many tokens are computed in the time that a stage takes to read its weights, which it does for each run.
TOKENS_OF_A_READING = 16


def micro_batches(batch: Batch, stages: int) -> list[Batch]:
    """The runs that are through soonest, in the order of the tokens. All ranks cut alike.

    G runs of N tokens are through P stages in G + P - 1 turns of TOKENS_OF_A_READING + N / G, which is least for
    G**2 = (P - 1) N / TOKENS_OF_A_READING.
    """
    tokens = batch.token_ids.size
    count = max(math.isqrt((stages - 1) * tokens // TOKENS_OF_A_READING), 1)
    bounds = [tokens * i // count for i in range(count + 1)]
    return [batch] if count == 1 else [_run(batch, *pair) for pair in pairwise(bounds)]


def _run(batch: Batch, start: int, stop: int) -> Batch:
    """Tokens start to stop."""
    first = np.searchsorted(batch.seq_starts, start, "right") - 1  # of the sequences
    last = np.searchsorted(batch.seq_starts, stop, "left")
    bounds = np.clip(batch.seq_starts[first : last + 1], start, stop)
    rows = batch.logit_rows[(start <= batch.logit_rows) & (batch.logit_rows < stop)]
    return Batch(
        token_ids=batch.token_ids[start:stop],
        positions=batch.positions[start:stop],
        seq_starts=bounds - np.int32(start),
        slots=batch.slots[first:last],
        context_lens=batch.positions[bounds[1:] - 1] + np.int32(1),
        logit_rows=rows - np.int32(start),
        embeds=batch.embeds,
    )
