"""The draw at its borders: on which of the candidates a number falls."""

import numpy as np
import pytest

from tinygpt.engine.sampler import Warpers, warpers_of
from tinygpt.kernels import reference
from tinygpt.kernels.cpu.sampling import STRIDE
from tinygpt.kernels.cpu.sampling import _draw as draw
from tinygpt.sampling_params import SamplingParams

GREATEST = np.nextafter(1.0, 0.0)  # of the numbers that are drawn
NUMBERS, DRAWN = (0.0, 0.2, 0.25, 0.5, 0.75, GREATEST), [0, 0, 1, 2, 3, 3]  # of four equal weights


def test_the_cumulated_weight_must_exceed_the_number():
    assert [draw(np.ones(4), number) for number in NUMBERS] == DRAWN


def test_so_it_must_in_the_reference(monkeypatch):
    numbers = iter(NUMBERS)
    monkeypatch.setattr(reference.sampling, "uniform", lambda *of: next(numbers))
    plain, count = warpers_of(SamplingParams(temperature=1.0)), len(NUMBERS)
    warpers, zeros = Warpers(*np.repeat([plain], count, axis=0).T), np.zeros(count, np.uint64)
    assert reference.sample(np.zeros((count, 4), np.float32), warpers, zeros, zeros, zeros).tolist() == DRAWN


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
