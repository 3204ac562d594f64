"""Recorded answers: which of them a new recording changes, and what an unknown question is told."""

import numpy as np
import pytest

from support import recorded
from support.recorded import Recordings


@pytest.mark.parametrize("is_whole", [False, True])
def test_near_answers_stay(tmp_path, monkeypatch, is_whole):
    """Another CPU's roundings change no file."""
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    array = np.float32([0.5, np.nan, -np.inf])
    first = Recordings("logits_of")
    first.heard = {"near": array, "far": array, "longer": array, "too large": None, "unasked": array}
    first.write(is_whole=True)
    before = first.path.read_bytes()

    same = Recordings("logits_of")
    same.heard = first.heard | {"near": array + np.float32(1e-5)}
    same.write(is_whole)
    assert first.path.read_bytes() == before

    other = Recordings("logits_of")
    other.heard = {"near": array + np.float32(1e-5), "far": array + 1, "longer": np.zeros(4), "new": array}
    other.write(is_whole)
    answers = Recordings("logits_of").stored
    expected = {"near": array, "far": array + 1, "longer": np.zeros(4), "new": array}
    unheard = {} if is_whole else {"too large": None, "unasked": array}
    assert answers.keys() == (expected | unheard).keys()
    for key, answer in expected.items():
        np.testing.assert_array_equal(answers[key], answer)


def test_an_unknown_question_is_told_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    monkeypatch.setattr(recorded, "HAS_TRANSFORMERS", False)
    ask = recorded.recorded(lambda prompt: np.array(prompt))
    with pytest.raises(pytest.fail.Exception, match=r"recorded.py tests/evaluation/test_recorded.py "):
        ask([1, 2])
