"""Groups of sequences in flight: each stage has one, and all get the tokens of single steps."""

import numpy as np
import pytest

from tinygpt.kernels.batch import Batch
from tinygpt.parallel.cut import run_groups


class Pipeline:
    """Logits that say which token comes: one that depends on the sequence's slot, position and last token."""

    def __init__(self):
        self.events = []

    def begin(self, batch, first_row):
        self.events.append(("begin", first_row, batch.positions[0]))
        assert batch.context_lens.tolist() == (batch.positions + 1).tolist()
        assert batch.logit_rows.tolist() == batch.seq_starts[:-1].tolist() == list(range(batch.token_ids.size))
        return lambda: following(batch.token_ids, batch.positions, batch.slots)

    def choose(self, logits, rows, step):
        self.events.append(("choose", rows.start, step))
        return logits


def following(token_ids, positions, slots):
    """Below 0 now and then: nothing could be chosen."""
    return (token_ids * 31 + positions * 7 + slots * 13) % 50 - 5


@pytest.mark.parametrize("count", [2, 5, 9])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_tokens_are_those_of_single_steps(count, stages):
    batch = Batch.of([[7 * i] for i in range(count)], [3 * i for i in range(count)], list(range(count)))
    pipeline, token_ids, expected = Pipeline(), batch.token_ids, []
    for step in range(6):
        expected.append(following(np.maximum(token_ids, 0), batch.positions + step, batch.slots))
        token_ids = expected[-1]
    found = run_groups(batch, min(stages, count), 6, pipeline.begin, pipeline.choose)
    np.testing.assert_array_equal(found, expected)


def test_a_stage_begins_with_another_group_before_a_step_is_through():
    batch, pipeline = Batch.of([[1], [2], [3]], [0, 0, 0], [0, 1, 2]), Pipeline()
    run_groups(batch, 2, 2, pipeline.begin, pipeline.choose)
    a, b = 0, 1  # the groups' first rows
    assert pipeline.events == [
        *[("begin", a, 0), ("begin", b, 0)],
        *[("choose", a, 0), ("begin", a, 1), ("choose", b, 0), ("begin", b, 1)],
        *[("choose", a, 1), ("choose", b, 1)],
    ]
