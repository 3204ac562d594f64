"""Sequences of any params, and a sampler of a backend without a model."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from tinygpt import SamplingParams
from tinygpt.engine.sampler import TokenRules
from tinygpt.engine.sequence import Sample, Sequence
from tinygpt.kernels import cpu, reference
from tinygpt.kernels.numbers import Warpers
from tinygpt.kernels.reference import sampling

V = 40
EOS = (7, 11)
BACKENDS = pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])


def sequence_of(prompt=(1, 2, 1), new=(), seed: int = 3, index: int = 0, **fields: Any) -> Sequence:
    params = SamplingParams(max_tokens=64, **fields)
    rules = TokenRules.of(params, frozenset(EOS), V, {})
    sample = Sample(list(prompt), params, seed, frozenset(EOS), token_rules=rules)
    sequence = Sequence(sample, index)
    sequence.new_token_ids.extend(new)
    return sequence


def filtered_by(backend: ModuleType, row: np.ndarray, **fields: Any) -> np.ndarray:
    """Return scores (V,) after the filters of these fields, by the backend if it has them all."""
    params = SamplingParams(**{"temperature": 1.0, **fields})
    if filters := sampling.filters_of(params, params.top_p, excludes_top=False):
        return sampling.filtered(row, filters)
    columns = {name: np.array([getattr(params, name)], np.float64) for name in Warpers._fields}
    return backend.filter_logits(row[None], Warpers(**columns))[0]


def halve(prompt_token_ids, new_token_ids, scores):
    return scores / 2


def forbid_the_last(prompt_token_ids, new_token_ids, scores):
    scores[(prompt_token_ids + new_token_ids)[-1]] = float("-inf")
    return scores


few_ids = st.integers(0, 9)  # so that much of a text comes again
ids = few_ids | st.integers(0, V - 1)
some_ids = st.lists(ids, max_size=4)
fields = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 1.9]),
        "top_k": st.integers(0, V),
        "top_p": st.floats(0.05, 1),
        "top_p_rule": st.sampled_from(["hf", "openai", "fastertransformer"]),
        "top_p_decay": st.floats(0.5, 1),
        "top_p_reset_ids": st.lists(ids, min_size=1, max_size=4),
        "min_p": st.floats(0, 0.5),
        "typical_p": st.floats(0.1, 1),
        "epsilon_cutoff": st.floats(0, 0.1),
        "eta_cutoff": st.floats(0, 0.1),
        "top_n_sigma": st.floats(-1, 3),
        "xtc_probability": st.floats(0, 1),
        "xtc_threshold": st.floats(0, 0.6),
        "dry_multiplier": st.floats(0, 2),
        "dry_allowed_length": st.integers(0, 2),
        "dry_penalty_last_n": st.integers(-1, 9),
        "logit_bias": st.dictionaries(ids, st.floats(-100, 100), max_size=4),
        "repetition_penalty": st.floats(0.5, 2),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
        "no_repeat_ngram_size": st.integers(0, 4),
        "bad_words_ids": st.lists(st.lists(ids, min_size=1, max_size=3), max_size=4),
        "min_tokens": st.integers(0, 9),
        "allowed_token_ids": st.lists(ids, min_size=1, max_size=9),
        "suppress_tokens": some_ids,
        "stop_token_ids": some_ids,
        "logits_processors": st.sampled_from([[], [halve], [forbid_the_last, halve]]),
        "logprobs": st.integers(0, V),
        "logprobs_mode": st.sampled_from(["raw", "processed"]),
        "ignore_eos": st.booleans(),
        "n": st.just(2),
        "best_of": st.just(3),
    },
)
any_sequence = st.builds(
    lambda prompt, new, seed, given: sequence_of(prompt, new, seed, **given),
    st.lists(ids, min_size=1, max_size=9),
    st.lists(ids, max_size=9),
    st.integers(0, 2**64 - 1),
    fields,
)


def any_params(kind: type = SamplingParams, **fields: Any) -> st.SearchStrategy:
    """Return a strategy of what requests to a model may ask for: params, or a dict of their fields."""
    fields = {
        "max_tokens": st.integers(1, 10),
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "top_k": st.sampled_from([0, 3]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "seed": st.integers(0, 3),
        "n": st.sampled_from([1, 1, 3]),
        "best_of": st.sampled_from([None, None, 4]),
        "logprobs": st.sampled_from([None, 0, 2]),
        "prompt_logprobs": st.sampled_from([None, None, 0, 2]),
        "prompt_lookup_num_tokens": st.sampled_from([0, 3]),
        "stop": st.sampled_from([None, "e", ["the ", "\x00"]]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "no_repeat_ngram_size": st.sampled_from([0, 2]),
        "min_tokens": st.sampled_from([0, 1]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "logit_bias": st.sampled_from([None, {11: 4.0}]),
        "ignore_eos": st.booleans(),
        **fields,
    }
    return st.builds(kind, **fields)
