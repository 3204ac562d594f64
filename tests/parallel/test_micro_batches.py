"""A step in runs: every token once, in order, with its own position, slot and logits; as many runs as are worth it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinygpt.kernels.batch import Batch
from tinygpt.parallel.cut import micro_batches

SEQUENCES = st.lists(st.tuples(st.integers(1, 70), st.integers(0, 50), st.integers(0, 70)), min_size=1, max_size=12)


@given(SEQUENCES, st.integers(1, 5))
def test_runs_are_the_step(sequences, stages):
    chunks = [[100 * i + j for j in range(count)] for i, (count, _, _) in enumerate(sequences)]
    starts, slots = [start for _, start, _ in sequences], [7 + 3 * i for i in range(len(sequences))]
    wanted = [min(rows, count) for count, _, rows in sequences]
    batch = Batch.of(chunks, starts, slots, wanted)
    runs = micro_batches(batch, stages)
    assert [token for run in runs for token in tokens_of(run)] == list(tokens_of(batch))
    for run in runs:
        last = run.positions[run.seq_starts[1:] - 1]
        assert run.context_lens.tolist() == (last + 1).tolist()
        assert {array.dtype for array in vars(run).values() if array is not run.embeds} == {np.dtype(np.int32)}
    assert max(run.token_ids.size for run in runs) - min(run.token_ids.size for run in runs) <= 1


def tokens_of(batch):
    """Of each token: its id, position, slot and whether its logits are wanted."""
    slots = np.repeat(batch.slots, np.diff(batch.seq_starts))
    is_wanted = np.isin(np.arange(batch.token_ids.size), batch.logit_rows)
    return zip(*(array.tolist() for array in (batch.token_ids, batch.positions, slots, is_wanted)), strict=True)


@pytest.mark.parametrize(
    ("tokens", "stages", "count"), [(500, 1, 1), (63, 2, 1), (64, 2, 2), (512, 2, 5), (32, 4, 2), (512, 4, 9)]
)
def test_a_stage_that_reads_its_weights_again_gains_more_than_that(tokens, stages, count):
    assert len(micro_batches(Batch.of([list(range(tokens))], [0], [0]), stages)) == count
