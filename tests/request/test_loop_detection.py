"""Loops against the definition: some pattern, often enough in a row, at the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinygpt import LLM, SamplingParams
from tinygpt.engine.sequence import is_looping


def detecting(max_pattern_size, min_count, min_pattern_size=1):
    fields = {"max_pattern_size": max_pattern_size, "min_count": min_count, "min_pattern_size": min_pattern_size}
    return SamplingParams(repetition_detection=fields)


@given(st.lists(st.integers(0, 2), max_size=14), st.integers(1, 4), st.integers(1, 4), st.integers(2, 4))
def test_any_tokens(token_ids, one_size, other_size, count):
    least, most = sorted((one_size, other_size))
    endings = [token_ids[len(token_ids) - size :] * count for size in range(least, most + 1) if size <= len(token_ids)]
    expected = any(token_ids[-len(ending) :] == ending for ending in endings)
    assert is_looping(token_ids, detecting(most, count, least)) == expected


@pytest.mark.parametrize(
    ("token_ids", "params", "expected"),
    [
        ([5, 5, 5], detecting(3, 3), True),
        ([5, 5, 5], detecting(3, 4), False),
        ([1, 2, 1, 2, 1, 2], detecting(2, 3), True),
        ([1, 2, 1, 2, 1, 2], detecting(1, 3), False),
        ([1, 2, 1, 2, 1, 2, 3], detecting(2, 3), False),
        ([5, 5, 5, 5], detecting(4, 4, min_pattern_size=2), False),
        ([5, 5, 5], SamplingParams(), False),
    ],
)
def test_some_tokens(token_ids, params, expected):
    assert is_looping(token_ids, params) == expected


def test_a_sample_that_loops_ends():
    def only_two_tokens(prompt_token_ids, new_token_ids, scores):
        scores[:] = float("-inf")
        scores[[10, 20][len(new_token_ids) % 2]] = 0
        return scores

    params = detecting(4, 3)
    fields = {"max_tokens": 30, "logits_processors": only_two_tokens}
    with LLM() as llm:
        output = llm.generate([[1, 2]], SamplingParams(repetition_detection=params.repetition_detection, **fields))
    assert output[0].outputs[0].token_ids == [10, 20] * 3
    assert output[0].outputs[0].finish_reason == "stop"
