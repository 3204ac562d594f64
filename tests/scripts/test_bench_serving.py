"""scripts/bench_serving.py --server: figures of a run, worked out by hand."""

import pytest

pytest.importorskip("h11", reason="h11, of the extra `serve`, is not installed")

from scripts.serving.client import Exchange
from scripts.serving.figures import ServiceLevel, figures, percentiles
from scripts.serving.workload import Run, Workload

LEVEL = ServiceLevel(time_to_first_token=0.5, time_per_output_token=0.1)


def test_figures_of_three_requests_of_which_one_failed():
    good = Exchange(sent=1.0, status=200, token_times=[1.25, 1.3125, 1.375])
    slow = Exchange(sent=1.0, status=200, token_times=[1.25, 1.5])
    found = figures(Run([good, slow, Exchange(sent=1.0, status=429)], seconds=2.0), LEVEL)
    assert (found["requests"], found["failed"]) == (3, 1)
    assert (found["tokens_per_second"], found["requests_per_second"], found["goodput"]) == (2.5, 1.0, 0.5)
    assert found["ttft_ms"]["p50"] == 250
    assert (found["tpot_ms"]["p50"], found["itl_ms"]["p50"], found["itl_ms"]["p99"]) == (250, 62.5, 250)


def test_percentiles_are_values_that_were_met():
    assert percentiles(i / 1000 for i in range(100)) == {"p50": 50, "p90": 90, "p99": 99}
    assert percentiles([]) == {}


def test_every_server_is_asked_the_same():
    one, other = (Workload(name, 8, 4, seed=3).prompts() for name in ("a", "b"))
    assert [next(one) for _ in range(5)] == [next(other) for _ in range(5)]
    ids = next(Workload("a", 8, 4, vocab_size=11).prompts())
    assert len(ids) == 8
    assert set(ids) <= set(range(11))
