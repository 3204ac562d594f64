"""The CPU's draw at its borders: on which of the candidates a number falls."""

import numpy as np
import pytest

from tinygpt.kernels.cpu.sampling.row import STRIDE
from tinygpt.kernels.cpu.sampling.sampling import _draw as draw

GREATEST = np.nextafter(1.0, 0.0)  # of the numbers that are drawn


def test_the_cumulated_weight_must_exceed_the_number():
    numbers = (0.0, 0.2, 0.25, 0.5, 0.75, GREATEST)
    assert [draw(np.ones(4), number) for number in numbers] == [0, 0, 1, 2, 3, 3]


@pytest.mark.parametrize("number", [0.0, 0.5, GREATEST])
def test_a_weight_of_zero_is_never_drawn(number):
    assert draw(np.array([0.0, 1.0, 0.0, 0.0]), number) == 1


@pytest.mark.parametrize("zeros", [0, 1, 3])
def test_rounding_leads_neither_past_the_last_weight_nor_to_a_zero(zeros):
    """Weights added up in another order than all of them may fall short of the goal, and some of these do."""
    rng = np.random.default_rng(zeros)
    for _ in range(100):
        weights = rng.random(2 * STRIDE) + 0.1
        weights[2 * STRIDE - zeros :] = 0
        assert draw(weights, GREATEST) == 2 * STRIDE - zeros - 1
