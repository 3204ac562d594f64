"""Completer, as Ray Data calls it; no Ray is needed for that."""

import numpy as np
import pytest

from tinygpt import LLM, SamplingParams
from tinygpt.cli.main import parse
from tinygpt.errors import RequestError
from tinygpt.on_ray.batch import setup
from tinygpt.on_ray.completer import Completer

ENGINE = {"threads": 1, "max_num_seqs": 2}
PARAMS = {"max_tokens": 6, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def completer(small_demo):
    return Completer(PARAMS, model=small_demo, **ENGINE)


def batch(*prompts, **columns):
    column = np.empty(len(prompts), object)
    column[:] = prompts
    return {"prompt": column, **columns}


def test_rows_get_what_generate_gives(completer, small_demo):
    found = completer(batch("The fox", "A wolf said", "He", id=np.arange(3)))
    with LLM(small_demo, **ENGINE) as llm:
        samples = [output.outputs[0] for output in llm.generate(["The fox", "A wolf said", "He"], **PARAMS)]
    assert list(found["generated_text"]) == [sample.text for sample in samples]
    assert list(found["generated_token_ids"]) == [sample.token_ids for sample in samples]
    assert list(found["finish_reason"]) == ["length"] * 3
    assert list(found["error"]) == [None] * 3
    assert found["id"].tolist() == [0, 1, 2]


def test_a_row_may_ask_for_something_else(completer):
    """What is None is not given: Arrow fills the fields that other rows have."""
    fields = np.array([{"max_tokens": 2, "seed": None}, {"max_tokens": None, "seed": 3}, None], object)
    found = completer(batch("The fox", np.array([5, 6, 7]), "He", sampling_params=fields))
    assert [len(ids) for ids in found["generated_token_ids"]] == [2, 6, 6]


def test_a_failure_is_a_value_of_its_row(completer):
    late = {"allowed_token_ids": np.array([11]), "no_repeat_ngram_size": 1}
    rows = [  # prompt, fields, and words of the error
        ([99999], None, "99999"),
        ("x", {"max_tokens": 9999}, "max_tokens"),
        ("x", {"wisdom": 3}, "unknown sampling field 'wisdom'"),
        ("x", {"n": 2}, "n is 2 and a row has room for one"),
        (None, None, "None"),
        (float("nan"), None, "float"),
        ("The fox " * 400, None, "positions"),
        ("x", "max_tokens=3", "max_tokens=3"),
        ("x", {3: 4}, "'3'"),
        ("x", {"stop": 5}, "stop"),
        ("The", late, "leave no token to choose at position 2"),
    ]
    fields = np.array([*(fields for _, fields, _ in rows), None], object)
    found = completer(batch(*(prompt for prompt, _, _ in rows), "The fox", sampling_params=fields))
    for error, (_, _, words) in zip(found["error"], rows, strict=False):
        assert words in error
    assert list(found["generated_text"][:-1]) == [None] * len(rows)
    assert found["error"][-1] is None
    assert found["generated_text"][-1]


def test_fields_are_read_as_arrow_gives_them(completer):
    """Arrays for lists, NumPy's numbers, and texts for the keys of a dict, each row with those of all rows."""
    fields = {
        "max_tokens": np.int64(3),
        "allowed_token_ids": np.array([11, 12]),
        "logit_bias": {"12": -50.0, "13": None},
    }
    found = completer(batch("The fox", sampling_params=np.array([fields], object)))
    assert list(found["error"]) == [None]
    assert found["generated_token_ids"][0] == [11] * 3


def test_what_is_wrong_with_the_engine_is_no_value_of_a_row(completer, monkeypatch):
    def fail(batch):
        raise MemoryError

    monkeypatch.setattr(completer._llm.engine.runner, "forward", fail)
    with pytest.raises(MemoryError):
        completer(batch("The fox"))


def test_what_no_row_could_have_is_refused(completer):
    with pytest.raises(RequestError, match="the rows have 'text' and need a column 'prompt'"):
        completer({"text": np.array(["x"])})
    with pytest.raises(RequestError, match="unknown sampling field 'wisdom'"):
        Completer({"wisdom": 3}, model="demo")
    with pytest.raises(RequestError, match="max_queue is for callers who can come again"):
        Completer(model="demo", max_queue=3)


def test_the_driver_checks_requests_without_weights():
    _, inputs = setup(parse(["generate", "--input", "prompts.jsonl", "--ray", "1", "--threads", "1"]))
    assert inputs.request("The fox", SamplingParams(prompt_lookup_num_tokens=2)).sequences
    with pytest.raises(
        RequestError, match="capture and edits need an LLM of one process, without ranks or Ray"
    ):
        inputs.request("The fox", SamplingParams(capture="z"))
