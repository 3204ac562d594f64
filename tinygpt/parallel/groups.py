"""Groups in flight: several decode steps of a pipeline, each of whose stages works on other sequences.

    stage 0   A1 B1 A2 B2 A3 B3        A1: group A's first step
    stage 1      A1 B1 A2 B2 A3 B3

A group's next step needs its own tokens alone, so with as many groups as stages none of them waits but for the ends.
"""

from collections.abc import Callable

import numpy as np

from tinygpt.kernels.batch import NO_EMBEDS, Batch


def run_groups(
    batch: Batch,
    stages: int,
    steps: int,
    begin: Callable[[Batch, int], Callable[[], np.ndarray]],
    choose: Callable[[np.ndarray, slice, int], np.ndarray],
) -> np.ndarray:
    """Tokens (steps, S), each of which is the next step's input. The batch has one new token for each sequence.

    begin(batch, first_row): take a step; what it returns waits for the logits. choose(logits, rows, step): the tokens.
    """
    count = batch.token_ids.size
    groups = [slice(count * i // stages, count * (i + 1) // stages) for i in range(stages)]
    tokens, waits = np.empty((steps, count), np.int32), {}
    for step in range(steps + 1):
        for i, rows in enumerate(groups):
            if step:
                tokens[step - 1, rows] = choose(waits[i](), rows, step - 1)
            if step < steps:
                # Where none could be chosen, the sequence goes on with token 0, and nobody looks at it.
                given = np.maximum(tokens[step - 1, rows], 0) if step else batch.token_ids[rows]
                waits[i] = begin(_decode(given, batch.positions[rows] + np.int32(step), batch.slots[rows]), rows.start)
    return tokens


def _decode(token_ids: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> Batch:
    bounds = np.arange(token_ids.size + 1, dtype=np.int32)
    return Batch(token_ids, positions, bounds, slots, positions + np.int32(1), bounds[:-1], NO_EMBEDS)
