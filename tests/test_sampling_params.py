"""Every field of SamplingParams: what it accepts, and the sentence for what it refuses."""

import copy
import dataclasses
import inspect
import pickle

import numpy as np
import pytest

from tinygpt.errors import RequestError
from tinygpt.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")
REFUSED = {
    "max_tokens": [0, -1, 2.0, "16", True, None, NAN, 2**31],
    "temperature": [-0.1, NAN, INF, -INF, True, "1", None, 1e-31, 10**400],
    "top_k": [-1, 1.5, True, None, "40", 2**31],
    "top_p": [0, 0.0, -0.5, 1.0001, NAN, INF, True, None, "0.9"],
    "seed": [-1, 2**64, 1.5, True, "7"],
    "n": [0, -3, 1.0, True, None, 10_001],
    "stop": ["", [""], ["a", ""], [1], 5, b"a", [None]],
    "stop_token_ids": [5, [-1], [1.5], [True], "13", ["13"]],
    "ignore_eos": [0, 1, None, "false"],
    "logprobs": [-1, 1.5, True, "5"],
}
ACCEPTED = {
    "max_tokens": [(1, 1), (np.int64(7), 7)],
    "temperature": [(0, 0.0), (1, 1.0), (np.float32(0.5), 0.5), (100.0, 100.0)],
    "top_k": [(0, 0), (np.int32(40), 40)],
    "top_p": [(1, 1.0), (np.float64(0.25), 0.25), (1e-9, 1e-9)],
    "seed": [(None, None), (0, 0), (2**64 - 1, 2**64 - 1), (np.uint64(2**64 - 1), 2**64 - 1)],
    "n": [(3, 3), (10_000, 10_000)],
    "stop": [(None, ()), ("end", ("end",)), (["a", "b"], ("a", "b")), ((), ())],
    "stop_token_ids": [(None, ()), ([1, np.int64(2)], (1, 2)), (np.array([3, 4]), (3, 4))],
    "ignore_eos": [(True, True)],
    "logprobs": [(None, None), (0, 0), (5, 5)],
}


def each(table):
    return [pytest.param(name, value, id=f"{name}-{value!r:.20}") for name in table for value in table[name]]


def test_every_field_is_tried():
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert names == list(REFUSED) == list(ACCEPTED)


@pytest.mark.parametrize(("name", "value"), each(REFUSED))
def test_impossible_value_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=rf"^{name}=.* is not possible: it must be ") as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("name", "value"), each(ACCEPTED))
def test_possible_value_is_kept_as_a_plain_one(name, value):
    given, kept = value
    held = getattr(SamplingParams(**{name: given}), name)
    assert held == kept
    assert type(held) is type(kept)


def test_all_impossible_values_are_named_at_once():
    with pytest.raises(RequestError, match=r"max_tokens=0 .*; top_p=2 .*; n=-1 "):
        SamplingParams(max_tokens=0, top_p=2, n=-1)


def test_a_huge_value_does_not_flood_the_message():
    with pytest.raises(RequestError) as caught:
        SamplingParams(top_p="x" * 10_000)
    assert len(str(caught.value)) < 200


def test_unknown_field_is_refused_with_a_hint_and_the_list():
    with pytest.raises(RequestError, match=r"'temprature' \(did you mean 'temperature'\?\).*stop_token_ids"):
        SamplingParams(temprature=1.0)
    with pytest.raises(RequestError, match=r"'beams'; the fields are max_tokens, "):
        SamplingParams(beams=4)


def test_it_stays_an_ordinary_frozen_dataclass():
    params = SamplingParams(stop="a", seed=3)
    assert dataclasses.replace(params, seed=4) == SamplingParams(stop="a", seed=4)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert len({params, copy.copy(params)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 5
    assert list(inspect.signature(SamplingParams).parameters) == list(ACCEPTED)
