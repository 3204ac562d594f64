"""The choice of experts and the tiles of their tokens on a simulated GPU, next to the reference's choice."""

import numpy as np
import pytest

from support.cuda_device import SimulatedDevice, normal
from support.tables import rows
from tinygpt.kernels.cuda.jit import WARP
from tinygpt.kernels.cuda.layers.experts import (
    CHOOSE_WARPS,
    SORT_THREADS,
    choose_kernel,
    max_tiles,
    sort_pairs,
)
from tinygpt.kernels.numbers import softmax

pytestmark = pytest.mark.usefixtures("compute_capability")

TILE_ROWS = 8
CASES = rows("""
5  | 3  | 1 | False
70 | 40 | 2 | True
21 | 2  | 2 | True
""")


@pytest.mark.parametrize(("tokens", "num_experts", "per_token", "sums_to_one"), CASES)
def test_each_token_is_in_the_tiles_of_its_experts(tokens, num_experts, per_token, sums_to_one):
    device = SimulatedDevice()
    scores = normal(tokens, num_experts)
    scores[::3, 1:] = scores[::3, :1]  # ties
    pairs = tokens * per_token
    shape = num_experts, per_token
    chosen, order, places = (np.full(pairs, -1, np.int32) for _ in range(3))
    shares = np.zeros(pairs, np.float32)
    counts = np.zeros(num_experts, np.int32)
    num_tiles = max_tiles(pairs, num_experts, TILE_ROWS)
    tiles = np.full(3 * num_tiles, -1, np.int32)
    sizes = np.array([tokens], np.int32)
    choice = chosen, shares, scores.ravel().copy(), *shape, sizes
    device.launch(choose_kernel(sums_to_one), -(-tokens // CHOOSE_WARPS), CHOOSE_WARPS * WARP, *choice)
    arrays = chosen, counts, order, places, tiles
    device.launch(sort_pairs, 1, SORT_THREADS, *arrays, *shape, TILE_ROWS, num_tiles, sizes)

    expected = np.argsort(-scores, axis=1, kind="stable")[:, :per_token]
    assert chosen.reshape(tokens, -1).tolist() == expected.tolist()
    of_chosen = np.take_along_axis(softmax(scores), expected, 1)
    of_chosen /= of_chosen.sum(1, keepdims=True) if sums_to_one else 1
    np.testing.assert_allclose(shares.reshape(tokens, -1), of_chosen, rtol=1e-5)
    assert counts.tolist() == np.bincount(expected.ravel(), minlength=num_experts).tolist()
    assert order[places].tolist() == np.repeat(np.arange(tokens), per_token).tolist()
    covered = []
    for expert, first, stop in tiles.reshape(-1, 3).tolist():
        assert stop - first <= TILE_ROWS
        assert all(expert in expected[token] for token in order[first:stop])
        covered += range(first, stop)
    assert covered == list(range(pairs))


def test_scores_that_are_not_numbers_choose_an_expert_and_share_nothing():
    chosen, shares = np.full(4, -1, np.int32), np.zeros(4, np.float32)
    scores = np.float32([np.nan, 1, 2, 3, np.nan, np.nan])
    SimulatedDevice().launch(
        choose_kernel(False), 1, CHOOSE_WARPS * WARP, chosen, shares, scores, 3, 2, np.array([2], np.int32)
    )
    assert ((chosen >= 0) & (chosen < 3)).all()
    assert np.isnan(shares).all()
