"""scripts/soak.py: a short run of both kinds, and the problems that it would report."""

import sys

import pytest

from scripts import soak


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
