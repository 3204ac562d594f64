"""The greatest score of a row, beside NumPy's."""

import numpy as np
import pytest

from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.sampling import NO_NUMBERS, sample
from tinygpt.kernels.cpu.sampling_rows import SCAN_BLOCK, greatest
from tinygpt.kernels.host import Warpers

SIZES = (1, 7, 64, SCAN_BLOCK - 1, SCAN_BLOCK, SCAN_BLOCK + 1, 3 * SCAN_BLOCK + 5)
ODD = np.array([0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-42, -1e-42, 3.4e38, -3.4e38], np.float32)


@jit
def greatest_of_rows(rows, token_ids):
    for r in range(rows.shape[0]):
        token_ids[r] = greatest(rows[r])


def assert_like_numpy(rows: np.ndarray) -> None:
    count = len(rows)
    found = np.empty(count, np.int32)
    greatest_of_rows(rows, found)
    greedy = Warpers(*np.zeros((len(Warpers._fields), count)))
    assert found.tolist() == sample(rows, greedy, *NO_NUMBERS).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_any_values(size):
    random = np.random.default_rng(size)
    rows = random.standard_normal((40, size), np.float32)
    rows[10:] = np.round(rows[10:])  # with ties, which the first wins
    rows[20:] -= np.float32(100)  # all below 0
    assert_like_numpy(rows)


@pytest.mark.parametrize("size", SIZES)
def test_zeros_infinities_and_what_is_no_number(size):
    random = np.random.default_rng(size)
    few = random.choice(ODD, (60, size))
    few[20:] = np.where(random.random((40, size)) < 0.01, few[20:], np.float32(-1))
    few[40:] = random.choice(ODD[[0, 1, 3, 7, 9]], (20, size))  # nothing above 0, and 0 of either sign
    assert_like_numpy(np.concatenate((few, *(np.full((1, size), odd) for odd in ODD))))
