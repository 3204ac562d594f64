"""Which of two ways a GPU takes: the faster one, and never one that gives other tokens."""

import warnings

import numpy as np
import pytest

from tinygpt.kernels.cuda.persistent import contest as contests
from tinygpt.kernels.cuda.persistent.contest import ROUNDS, WARM_UPS, Contest

TOKENS = np.array([[3], [1]])


class Way:
    """Takes so many seconds of a clock of its own."""

    def __init__(self, clock: list[float], seconds: float, answer=TOKENS):
        self.clock, self.seconds, self.answer, self.calls = clock, seconds, answer, 0

    def __call__(self, *arguments):
        self.calls += 1
        self.clock[0] += self.seconds * (100 if self.calls <= WARM_UPS else 1)  # compiling
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(contests.time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize(("usual", "other"), [(2.0, 1.0), (1.0, 2.0), (1.0, 1.0)])
def test_the_faster_way_is_taken_for_good(clock, usual, other):
    ways = Way(clock, usual), Way(clock, other)
    contest = Contest(*ways)
    for _ in range(WARM_UPS + ROUNDS):
        assert contest.winner is None
        assert (contest.run("batch") == TOKENS).all()
    before = [way.calls for way in ways]
    assert before == [WARM_UPS + ROUNDS] * 2
    contest.run("batch")
    assert contest.winner is ways[other < usual]
    assert [way.calls - calls for way, calls in zip(ways, before, strict=True)] == [other >= usual, other < usual]


def test_a_way_that_fails_is_not_passed_over(clock):
    """After an illegal access, say, the GPU answers nothing any more: the usual way would fail, and hide why."""
    usual, other, error = Way(clock, 2.0), Way(clock, 1.0), RuntimeError("an illegal memory access")
    other.answer = error
    contest = Contest(usual, other)
    with pytest.raises(RuntimeError, match="illegal memory access") as caught:
        contest.run("batch")
    assert caught.value is error
    assert contest.winner is None


def test_a_way_to_other_tokens_is_out_at_once_and_says_so(clock):
    usual, other = Way(clock, 2.0), Way(clock, 1.0, TOKENS + 1)
    contest = Contest(usual, other)
    with pytest.warns(RuntimeWarning, match="gives other tokens"):
        assert (contest.run("batch") == TOKENS).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (contest.run("batch") == TOKENS).all()
    assert (usual.calls, other.calls) == (2, 1)
