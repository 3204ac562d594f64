"""SamplingParams as an object: copies, comparison, help, guides; `tests/data/calls.txt` has what each field takes."""

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys

import numpy as np
import pytest

from tinygpt import LLM, sampling_params
from tinygpt.errors import RequestError
from tinygpt.sampling_params import RepetitionDetection, SamplingParams


def test_a_default_is_what_its_rule_makes_of_it():
    """Defaults other than None are not read again."""
    for field in (*dataclasses.fields(SamplingParams), *dataclasses.fields(RepetitionDetection)):
        if field.default not in (None, dataclasses.MISSING):
            kept = field.metadata["rule"].read(field.default)
            assert (kept, type(kept)) == (field.default, type(field.default)), field.name


def test_an_error_carries_field_value_and_allowed_values():
    with pytest.raises(RequestError) as caught:
        SamplingParams(top_p=2)
    error = caught.value
    assert (error.field, error.value, error.allowed) == ("top_p", 2, "a number above 0 and at most 1")


def test_help_lists_every_field():
    for name, field in sampling_params.SAMPLING_FIELDS.items():
        assert f"\n    {name}: {field.metadata['help']} (" in SamplingParams.__doc__


def test_embeddings_are_kept_as_an_array_of_our_own():
    given = np.ones((2, 3))
    params = SamplingParams(prompt_embeds=given)
    given[:] = 0
    for held in (params.prompt_embeds, copy.deepcopy(params).prompt_embeds):
        assert held.dtype == np.float32
        np.testing.assert_array_equal(held, np.ones((2, 3)))
    assert not params.prompt_embeds.flags.writeable


def test_it_stays_an_ordinary_frozen_dataclass():
    loops = RepetitionDetection(2, 3)
    fields = {"stop": "a", "logit_bias": {5: 1}, "bad_words_ids": [[1]], "repetition_detection": loops}
    params = SamplingParams(seed=3, **fields)
    assert dataclasses.replace(params, seed=4) == SamplingParams(seed=4, **fields)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert len({params, copy.copy(params)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 5
    assert [*inspect.signature(SamplingParams).parameters] == [*sampling_params.SAMPLING_FIELDS]


GUIDES = {"guided_choice": ["a"], "guided_regex": "a", "guided_json": {}, "guided_grammar": 'start: "a"'}
NOTHING_STARTS = f"""
import subprocess, sys, threading
subprocess.Popen = None
from tinygpt import SamplingParams
params = [SamplingParams(**{{name: value}}) for name, value in {GUIDES!r}.items()]
assert threading.active_count() == 1
assert "llguidance" not in sys.modules
"""


def test_params_start_no_process_and_import_no_package():
    subprocess.run([sys.executable, "-c", NOTHING_STARTS], check=True)


@pytest.mark.parametrize("name", GUIDES)
def test_the_missing_package_is_named_before_any_work(name, monkeypatch, small_demo):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    install = 'pip install "tinygpt[guided]"'
    sentence = f"{name} needs the package llguidance, which is not installed: {install}."
    with LLM(small_demo) as llm:
        monkeypatch.setattr(llm.engine, "submit", None)
        with pytest.raises(RequestError) as error:
            llm.generate("a", SamplingParams(**{name: GUIDES[name]}))
        assert str(error.value) == sentence
