"""scripts/soak.py: a short run of each kind, and the problems that it would report."""

import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings

from scripts import soak
from support.examples import examples
from tinygpt import LLM
from tinygpt.errors import TinyGPTError


@pytest.mark.parametrize("more", [[], ["--server"]])
def test_a_short_run_loses_nothing(more, monkeypatch, capsys):
    monkeypatch.setattr(soak, "ALLOWED_GROWTH", 2.0)  # buffers grow at the beginning
    monkeypatch.setattr(sys, "argv", ["soak.py", "--requests", "192", *more])
    assert soak.main() == 0
    assert "192 requests in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, None),
        ({"ends": soak.Counter(length=9)}, "9 of 10 requests ended"),
        ({"ends": soak.Counter({"length": 9, "KeyError: x": 1})}, "KeyError: x"),
        ({"differing": 1}, "1 repeated requests differed"),
        ({"memory": [100 * 2**20] * 8 + [103 * 2**20] * 2}, "memory grew from 100.0 to 103.0 MB"),
    ],
)
def test_problems_are_reported(changes, sentence):
    fields = {"ends": soak.Counter(length=8, cancelled=2), "memory": [100 * 2**20] * 10}
    found = soak.Report(**{**fields, **changes}).problems(10)
    assert len(found) == (sentence is not None)
    assert sentence is None or sentence in found[0]


def test_requests_in_company_and_alone():
    soak.compare_alone(examples(15), 1)


def test_a_request_that_sees_others_is_found(monkeypatch):
    """Its seed depends on the number of requests before it."""
    count, submit = iter(range(10**6)), LLM.submit

    def submit_with_another_seed(llm, prompt, params):
        return submit(llm, prompt, replace(params, seed=next(count), temperature=1.0, guided_choice=None))

    monkeypatch.setattr(LLM, "submit", submit_with_another_seed)
    # A smaller batch is not looked for.
    limits = {"phases": [Phase.generate], "suppress_health_check": list(HealthCheck), "database": None}
    monkeypatch.setattr(soak, "run_settings", lambda count, _: settings(max_examples=count, **limits))
    with pytest.raises((AssertionError, TinyGPTError)):
        soak.compare_alone(50, 1)
