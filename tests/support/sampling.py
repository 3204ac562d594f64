"""Sequences of any params, and a sampler of a backend without a model."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from support.kernel_tools import warpers_of
from support.tables import rows
from tinygpt import SamplingParams
from tinygpt.engine.sampling_state import TokenRules
from tinygpt.engine.sequence import Sample, Sequence
from tinygpt.kernels import cpu, reference
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
    warpers = warpers_of(1, params.temperature, params.top_k, params.top_p, params.min_p)
    return backend.filter_logits(row[None], warpers)[0]


def halve(prompt_token_ids, new_token_ids, scores):
    return scores / 2


def forbid_the_last(prompt_token_ids, new_token_ids, scores):
    scores[(prompt_token_ids + new_token_ids)[-1]] = float("-inf")
    return scores


few_ids = st.integers(0, 9)  # so that much of a text comes again
ids = few_ids | st.integers(0, V - 1)
some_ids = st.lists(ids, max_size=4)
NUMBERS = rows("""
top_k | integers | 0 | 40
top_p | floats | 0.05 | 1
top_p_decay | floats | 0.5 | 1
min_p | floats | 0 | 0.5
typical_p | floats | 0.1 | 1
epsilon_cutoff | floats | 0 | 0.1
eta_cutoff | floats | 0 | 0.1
top_n_sigma | floats | -1 | 3
xtc_probability | floats | 0 | 1
xtc_threshold | floats | 0 | 0.6
dry_multiplier | floats | 0 | 2
dry_allowed_length | integers | 0 | 2
dry_penalty_last_n | integers | -1 | 9
repetition_penalty | floats | 0.5 | 2
frequency_penalty | floats | -2 | 2
presence_penalty | floats | -2 | 2
no_repeat_ngram_size | integers | 0 | 4
min_tokens | integers | 0 | 9
logprobs | integers | 0 | 40
""")
fields = st.fixed_dictionaries(
    {},
    optional={
        **{name: getattr(st, kind)(least, most) for name, kind, least, most in NUMBERS},
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 1.9]),
        "top_p_rule": st.sampled_from(["hf", "openai", "fastertransformer"]),
        "top_p_reset_ids": st.lists(ids, min_size=1, max_size=4),
        "logit_bias": st.dictionaries(ids, st.floats(-100, 100), max_size=4),
        "bad_words_ids": st.lists(st.lists(ids, min_size=1, max_size=3), max_size=4),
        "allowed_token_ids": st.lists(ids, min_size=1, max_size=9),
        "suppress_tokens": some_ids,
        "stop_token_ids": some_ids,
        "logits_processors": st.sampled_from([[], [halve], [forbid_the_last, halve]]),
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


CHOICES = rows(r"""
temperature | [0.0, 0.7, 1.5]
top_k | [0, 3]
top_p | [1.0, 0.8]
seed | [0, 1, 2, 3]
n | [1, 1, 3]
best_of | [null, null, 4]
logprobs | [null, 0, 2]
prompt_logprobs | [null, null, 0, 2]
prompt_lookup_num_tokens | [0, 3]
stop | [null, "e", ["the ", "\u0000"]]
repetition_penalty | [1.0, 1.3]
frequency_penalty | [0.0, 0.5]
no_repeat_ngram_size | [0, 2]
min_tokens | [0, 1]
min_p | [0.0, 0.05]
ignore_eos | [false, true]
""")


def any_params(kind: type = SamplingParams, **fields: Any) -> st.SearchStrategy:
    """Return a strategy of what requests to a model may ask for: params, or a dict of their fields."""
    usual = {name: st.sampled_from(values) for name, values in CHOICES}
    usual |= {"max_tokens": st.integers(1, 10), "logit_bias": st.sampled_from([None, {11: 4.0}])}
    return st.builds(kind, **usual | fields)
