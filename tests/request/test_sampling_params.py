"""Every field of SamplingParams: what it accepts, and the sentence for what it refuses."""

import copy
import dataclasses
import inspect
import math
import pickle
import re

import numpy as np
import pytest

from tinygpt import Edit, sampling_params
from tinygpt.engine.prompts import check_vocabulary, resolve_bad_words
from tinygpt.errors import RequestError
from tinygpt.sampling_params import RepetitionDetection, SamplingParams

EDIT = Edit("z", keep=0)

NAN, INF = float("nan"), float("inf")


class NoSchema:
    """As pydantic's classes do whose fields no schema can describe, with an error of pydantic's own."""

    @staticmethod
    def model_json_schema():
        raise LookupError("no schema")


REFUSED = {
    "max_tokens": [0, -1, 2.0, "16", True, None, NAN, 2**31],
    "temperature": [-0.1, NAN, INF, -INF, True, "1", None, 1e-31, 10**400],
    "top_k": [-2, 1.5, True, None, "40", 2**31],
    "top_p": [0, 0.0, -0.5, 1.0001, NAN, INF, True, None, "0.9"],
    "seed": [-2, 2**64, 1.5, True, "7"],
    "n": [0, -3, 1.0, True, None, 10_001],
    "stop": ["", [""], ["a", ""], [1], 5, b"a", [None]],
    "stop_token_ids": [5, [-1], [1.5], [True], "13", ["13"]],
    "ignore_eos": [0, 1, None, "false"],
    "logprobs": [-2, 1.5, True, "5"],
    "logit_bias": [5, [1, 2], {-1: 0.0}, {1.5: 0.0}, {"5": 1.0}, {5: 100.1}, {5: NAN}, {5: -INF}, {5: None}],
    "repetition_penalty": [0, -1.0, 1e-4, 1e4, NAN, INF, None, "1", True],
    "frequency_penalty": [-2.1, 2.1, NAN, None, "1", True],
    "presence_penalty": [-2.1, 2.1, NAN, None, "1", True],
    "presence_penalty_rule": ["ft", "hf", None],
    "no_repeat_ngram_size": [-1, 1.5, None, True],
    "dry_multiplier": [-0.1, 1001, NAN, None, True],
    "dry_base": [0.9, 1001, NAN, None],
    "dry_allowed_length": [-1, 1.5, None],
    "dry_penalty_last_n": [-2, 1.5, None],
    "dry_sequence_breakers": ["", [""], [1], 5],
    "bad_words": ["", " ", ["a", "\n"], [1], 5],
    "bad_words_ids": [5, [5], [[]], [None], [[1], [-1]], [[1.5]]],
    "min_tokens": [-1, 1.5, None, True],
    "allowed_token_ids": [[], 5, [-1], [1.5], ["a"]],
    "suppress_tokens": [5, [-1], [1.5], [True]],
    "logits_processors": [5, "f", [None], [len, 5]],
    "top_p_rule": ["ft", "HF", None, 0, ["hf"]],
    "top_p_decay": [0, -0.5, 1.1, NAN, None],
    "top_p_min": [0, -0.5, 1.1, NAN, None],
    "top_p_reset_ids": [[], -1, 1.5, [True], "a"],
    "min_p": [-0.1, 1.1, NAN, None, True],
    "typical_p": [0, -0.5, 1.1, NAN, None],
    "epsilon_cutoff": [-0.1, 1.0, NAN, None],
    "eta_cutoff": [-0.1, 1.0, NAN, None],
    "top_n_sigma": [-1.5, INF, NAN, None],
    "xtc_probability": [-0.1, 1.1, NAN, None],
    "xtc_threshold": [-0.1, 1.1, NAN, None],
    "best_of": [0, 1.5, True, 10_001],
    "num_beams": [0, 1.5, True, None, 1001],
    "length_penalty": [-10.1, 10.1, NAN, None, "1", True],
    "early_stopping": [0, None, "always", "True"],
    "num_beam_groups": [0, 1.5, True, None],
    "diversity_penalty": [-0.1, 2e6, NAN, None, True],
    "beam_search_diversity_rate": [-2e6, 2e6, NAN, None, True],
    "prompt_lookup_num_tokens": [-1, 1.5, True, None],
    "max_matching_ngram_size": [0, 1.5, True, None],
    "eos_token_id": [[], -1, 1.5, [True], "a"],
    "include_stop_str_in_output": [0, None, "true"],
    "max_time": [0, -1.0, NAN, INF, True, "1"],
    "repetition_detection": [
        5,
        {"max_pattern_size": 0, "min_count": 2},
        {"max_pattern_size": 3, "min_count": 1},
        {},
    ],
    "prompt_logprobs": [-2, 1.5, True, "5"],
    "logprobs_mode": ["RAW", None, "raw_logprobs"],
    "overflow": ["cut", "REFUSE", None, True],
    "stride": [0, -1, 1.5, True, "5"],
    "soft_prompt": ["", 5, True, ["a"]],
    "lora_request": ["", 5, True, ["a"]],
    "prompt_embeds": [5, [], [1.0, 2.0], [[]], [[[1.0]]], [[NAN]], [[INF]], [["a"]], [[1.0], [1.0, 2.0]]],
    "capture": [5, [""], [None]],
    "edits": [5, "z", [None], [{"name": "z"}]],
    "guided_choice": ["yes", [], ["a", ""], ["a", 3], ["\ud800"], 3],
    "guided_regex": ["", ["a"], 3, "\ud800"],
    "guided_json": [
        "{",
        "[]",
        "3",
        [],
        True,
        {"const": math.nan},
        {"const": {1, 2}},
        "[" * 100_000,
        NoSchema,
    ],
    "guided_grammar": ["", b"start", 3],
}
ACCEPTED = {
    "max_tokens": [(1, 1), (np.int64(7), 7)],
    "temperature": [(0, 0.0), (1, 1.0), (np.float32(0.5), 0.5), (100.0, 100.0)],
    "top_k": [(0, 0), (-1, 0), (np.int32(40), 40)],
    "top_p": [(1, 1.0), (np.float64(0.25), 0.25), (1e-9, 1e-9)],
    "seed": [(None, None), (-1, None), (0, 0), (2**64 - 1, 2**64 - 1), (np.uint64(2**64 - 1), 2**64 - 1)],
    "n": [(3, 3), (10_000, 10_000)],
    "stop": [(None, ()), ("end", ("end",)), (["a", "b"], ("a", "b")), ((), ())],
    "stop_token_ids": [(None, ()), ([1, np.int64(2)], (1, 2)), (np.array([3, 4]), (3, 4))],
    "ignore_eos": [(True, True)],
    "logprobs": [(None, None), (0, 0), (5, 5), (-1, -1)],
    "logit_bias": [(None, ()), ({np.int64(5): 1, 6: -100}, ((5, 1.0), (6, -100.0))), ((), ())],
    "repetition_penalty": [(1, 1.0), (np.float32(0.5), 0.5), (1000, 1000.0)],
    "frequency_penalty": [(0, 0.0), (-2, -2.0), (2.0, 2.0)],
    "presence_penalty": [(0, 0.0), (-2, -2.0), (2.0, 2.0)],
    "presence_penalty_rule": [("openai", "openai"), ("fastertransformer", "fastertransformer")],
    "no_repeat_ngram_size": [(0, 0), (np.int32(3), 3)],
    "dry_multiplier": [(0, 0.0), (0.8, 0.8)],
    "dry_base": [(1, 1.0), (1.75, 1.75)],
    "dry_allowed_length": [(0, 0), (np.int64(3), 3)],
    "dry_penalty_last_n": [(-1, -1), (0, 0)],
    "dry_sequence_breakers": [(None, ("\n", ":", '"', "*")), ("a", ("a",)), ([], ()), ("none", ())],
    "bad_words": [(None, ()), ("a b", ("a b",)), ([" a", "b"], (" a", "b"))],
    "bad_words_ids": [
        (None, ()),
        ([[1, np.int64(2)], (3,)], ((1, 2), (3,))),
        (np.array([[1, 2]]), ((1, 2),)),
    ],
    "min_tokens": [(0, 0), (16, 16)],
    "allowed_token_ids": [(None, None), ([5, np.int64(6)], (5, 6))],
    "suppress_tokens": [(None, ()), ([5, 6], (5, 6))],
    "logits_processors": [(None, ()), (len, (len,)), ([len, max], (len, max))],
    "top_p_rule": [("hf", "hf"), ("openai", "openai"), ("fastertransformer", "fastertransformer")],
    "top_p_decay": [(1, 1.0), (0.5, 0.5)],
    "top_p_min": [(1, 1.0), (1e-9, 1e-9)],
    "top_p_reset_ids": [(None, None), (0, (0,)), ([1, 2], (1, 2))],
    "min_p": [(0, 0.0), (1, 1.0)],
    "typical_p": [(1, 1.0), (0.5, 0.5)],
    "epsilon_cutoff": [(0, 0.0), (0.5, 0.5)],
    "eta_cutoff": [(0, 0.0), (0.5, 0.5)],
    "top_n_sigma": [(-1, -1.0), (0, 0.0), (1.5, 1.5)],
    "xtc_probability": [(0, 0.0), (1, 1.0)],
    "xtc_threshold": [(0, 0.0), (1, 1.0)],
    "best_of": [(None, None), (np.int64(4), 4)],
    "num_beams": [(1, 1), (np.int64(4), 4)],
    "length_penalty": [(0, 0.0), (-1, -1.0)],
    "early_stopping": [(False, False), (True, True), ("never", "never")],
    "num_beam_groups": [(1, 1)],
    "diversity_penalty": [(0, 0.0)],
    "beam_search_diversity_rate": [(0, 0.0), (-2, -2.0)],
    "prompt_lookup_num_tokens": [(0, 0), (10, 10)],
    "max_matching_ngram_size": [(np.int64(3), 3)],
    "eos_token_id": [(None, None), (np.int64(0), (0,)), ([1, 2], (1, 2))],
    "include_stop_str_in_output": [(True, True)],
    "max_time": [(None, None), (1, 1.0)],
    "repetition_detection": [
        (None, None),
        ({"max_pattern_size": 3, "min_count": 2}, RepetitionDetection(3, 2, 1)),
        (RepetitionDetection(3, 2, 3), RepetitionDetection(3, 2, 3)),
    ],
    "prompt_logprobs": [(None, None), (0, 0), (5, 5), (-1, -1)],
    "logprobs_mode": [("raw", "raw"), ("processed", "processed")],
    "overflow": [("refuse", "refuse"), ("clamp", "clamp"), ("truncate", "truncate"), ("slide", "slide")],
    "stride": [(None, None)],
    "soft_prompt": [(None, None), ("mine", "mine")],
    "lora_request": [(None, None), ("mine", "mine")],
    "prompt_embeds": [(None, None)],
    "capture": [(None, ()), ("z", ("z",)), (["z", "hook_*"], ("z", "hook_*"))],
    "edits": [(None, ()), (EDIT, (EDIT,)), ([EDIT, EDIT], (EDIT, EDIT))],
    "guided_choice": [(None, None), (["a", "b"], ("a", "b"))],
    "guided_regex": [(None, None), ("a+", "a+")],
    "guided_json": [(None, None), ({"type": "object"}, '{"type": "object"}'), ("{}", "{}")],
    "guided_grammar": [(None, None), ('start: "a"', 'start: "a"')],
}


def test_every_field_is_tried():
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert names == list(REFUSED) == list(ACCEPTED)


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_values_are_refused_by_name(name):
    assert issubclass(RequestError, ValueError)
    for value in REFUSED[name]:
        none = r", or None\.$" if name.startswith("guided") else ""
        assert re.match(rf"{name} is .* and must be .*{none}", sentence_of(**{name: value})), value


def sentence_of(**fields) -> str:
    try:
        return f"taken as {SamplingParams(**fields)}"
    except RequestError as error:
        return str(error)


@pytest.mark.parametrize("name", ACCEPTED)
def test_possible_values_are_kept_as_plain_ones(name):
    needed = (
        {"num_beams": 2} if name in ("length_penalty", "early_stopping", "beam_search_diversity_rate") else {}
    )
    for given, kept in ACCEPTED[name]:
        held = getattr(SamplingParams(**needed, **{name: given}), name)
        assert held == kept
        assert type(held) is type(kept), given


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


PRESENCE = {"presence_penalty": 0.5, "presence_penalty_rule": "fastertransformer"}


@pytest.mark.parametrize(("top_k", "temperature"), [(0, 0.0), (5, 0.7)])
def test_fastertransformers_top_p_of_0_is_greedy_or_top_k_alone(top_k, temperature):
    """TopKSamplingLayer.cu: k 0 and p 0 is k 1; k above 0 and p 0 is p 1."""
    found = SamplingParams(temperature=0.7, top_k=top_k, top_p=0, top_p_rule="fastertransformer")
    assert (found.temperature, found.top_k, found.top_p) == (temperature, top_k, 1.0)
    assert dataclasses.replace(found, n=2).top_p == 1.0


@pytest.mark.parametrize(
    ("fields", "name", "why"),
    [
        ({"n": 3, "best_of": 2}, "best_of", "is 2 and must be at least n, which is 3"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "is 4 and must be at most max_tokens, which is 3"),
        ({"num_beams": 2, "n": 3}, "n", "at most num_beams, which is 2"),
        ({"num_beams": 2, "temperature": 0.7}, "temperature", "0 with num_beams"),
        ({"num_beams": 2, "best_of": 2}, "best_of", "left out with num_beams"),
        (
            {"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 1.0},
            "num_beam_groups",
            "a divisor of num_beams",
        ),
        (
            {"num_beams": 4, "num_beam_groups": 2},
            "diversity_penalty",
            "above 0 exactly if num_beam_groups, which is 2",
        ),
        (
            {"num_beams": 4, "diversity_penalty": 1.0},
            "diversity_penalty",
            "num_beam_groups, which is 1, is above 1",
        ),
        (
            {
                "num_beams": 2,
                "num_beam_groups": 2,
                "diversity_penalty": 1.0,
                "beam_search_diversity_rate": 0.5,
            },
            "beam_search_diversity_rate",
            "must be 0 with groups",
        ),
        ({"beam_search_diversity_rate": 0.5}, "beam_search_diversity_rate", "num_beams is 1: set num_beams"),
        (
            {**PRESENCE, "repetition_penalty": 1.5},
            "presence_penalty_rule",
            "must be 'openai' with another penalty",
        ),
        (
            {**PRESENCE, "frequency_penalty": 0.5},
            "presence_penalty_rule",
            "must be 'openai' with another penalty",
        ),
        ({**PRESENCE, "num_beams": 2}, "presence_penalty_rule", "or with num_beams"),
        ({"num_beam_groups": 2}, "num_beam_groups", "num_beams is 1: set num_beams"),
        ({"diversity_penalty": 1.0}, "diversity_penalty", "num_beams is 1: set num_beams"),
        ({"early_stopping": True}, "early_stopping", "num_beams is 1: set num_beams"),
        ({"length_penalty": 2.0}, "length_penalty", "num_beams is 1: set num_beams"),
        ({"stride": 4}, "stride", "for the overflow 'slide': set that too"),
        ({"overflow": "slide", "num_beams": 2}, "overflow", "must be another one with num_beams"),
    ],
    ids=str,
)
def test_impossible_combinations_are_refused_by_name(fields, name, why):
    with pytest.raises(RequestError, match=why) as caught:
        SamplingParams(**fields)
    assert (caught.value.field, caught.value.value) == (name, fields.get(name, 0.0))


def test_repetition_detection_names_what_is_impossible():
    with pytest.raises(
        RequestError, match="min_pattern_size is 4 and must be at most max_pattern_size, which is 3"
    ):
        RepetitionDetection(max_pattern_size=3, min_count=2, min_pattern_size=4)
    with pytest.raises(RequestError, match="min_count is 1 and must be"):
        RepetitionDetection(1, 1, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_token_ids", [1, 50]),
        ("bad_words_ids", [[1], [2, 50]]),
        ("eos_token_id", 50),
        ("logit_bias", {50: 1.0}),
        ("stop_token_ids", [50]),
        ("suppress_tokens", [50]),
        ("top_p_reset_ids", [50]),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused_by_name(name, value):
    params = SamplingParams(**{name: value})
    check_vocabulary(params, 51)
    with pytest.raises(RequestError, match=rf"^{name} holds token id 50, .* knows ids 0 to 49\.$"):
        check_vocabulary(params, 50)


def test_embeddings_are_kept_as_an_array_of_our_own():
    given = np.ones((2, 3))
    params = SamplingParams(prompt_embeds=given)
    given[:] = 0
    for held in (params.prompt_embeds, copy.deepcopy(params).prompt_embeds):
        assert held.dtype == np.float32
        np.testing.assert_array_equal(held, np.ones((2, 3)))
    assert not params.prompt_embeds.flags.writeable


def test_embeddings_are_compared():
    params = SamplingParams(prompt_embeds=[[1, 2]])
    same = SamplingParams(prompt_embeds=np.array([[1, 2]]))
    assert (params == same, hash(params) == hash(same), len({params, same})) == (True, True, 1)
    assert pickle.loads(pickle.dumps(params)) == params
    for others in ([[1, 3]], [[1], [2]], None):
        assert params != SamplingParams(prompt_embeds=others)
    assert params != "params"


def test_bad_words_become_ids_with_and_without_a_space():
    encode = {"cat": [1], " cat": [2, 3], "dog": [4], " dog": [4]}.__getitem__
    params = SamplingParams(bad_words=["cat", " dog"], bad_words_ids=[[9], [1]], seed=5)
    resolved = resolve_bad_words(params, encode)
    assert resolved == SamplingParams(bad_words_ids=[[9], [1], [2, 3], [4]], seed=5)


def test_a_huge_value_does_not_flood_the_message():
    with pytest.raises(RequestError) as caught:
        SamplingParams(top_p="x" * 10_000)
    assert len(str(caught.value)) < 200


def test_unknown_field_is_refused_with_a_hint_or_where_to_look():
    with pytest.raises(RequestError, match=r"'temprature'; did you mean temperature\?$"):
        SamplingParams(temprature=1.0)
    with pytest.raises(RequestError, match=r"'frobnicate'; help\(SamplingParams\) has all names"):
        SamplingParams(frobnicate=4)


def test_it_stays_an_ordinary_frozen_dataclass():
    loops = RepetitionDetection(2, 3)
    fields = {"stop": "a", "logit_bias": {5: 1}, "bad_words_ids": [[1]], "repetition_detection": loops}
    params = SamplingParams(seed=3, **fields)
    assert dataclasses.replace(params, seed=4) == SamplingParams(seed=4, **fields)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert len({params, copy.copy(params)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 5
    assert list(inspect.signature(SamplingParams).parameters) == list(ACCEPTED)


@pytest.mark.parametrize(
    ("others", "ours"),
    [
        (
            {"max_new_tokens": 3, "num_return_sequences": 2, "temperature": 1},
            {"max_tokens": 3, "n": 2, "temperature": 1},
        ),
        ({"repeat_penalty": 1.2, "end_id": 5}, {"repetition_penalty": 1.2, "eos_token_id": 5}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.5}, {"temperature": 0.5}),
        ({"do_sample": False, "temperature": 0.5}, {"temperature": 0.0}),
        ({"use_cache": True, "pad_token_id": 0, "n_predict": 4}, {"max_tokens": 4}),
    ],
)
def test_names_of_other_programs(others, ours):
    assert SamplingParams(**others) == SamplingParams(**ours)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"max_new_tokens": 3, "max_tokens": 3},
            "max_new_tokens and max_tokens name one thing: give one of them.",
        ),
        ({"ckpt_path": "x"}, "unknown sampling field 'ckpt_path'"),
        ({"do_sample": 3}, "unknown sampling field 'do_sample'"),
        ({"max_new_tokens": "x"}, "max_tokens is 'x' and must be"),
    ],
)
def test_names_of_other_programs_that_are_refused(given, says):
    with pytest.raises(RequestError, match=re.escape(says)):
        SamplingParams(**given)
