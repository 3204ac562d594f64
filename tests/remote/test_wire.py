"""What goes over the wire comes out as it went in."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinygpt.errors import RequestError
from tinygpt.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk
from tinygpt.remote import wire
from tinygpt.sampling_params import SamplingParams

NUMBERS = st.floats(max_value=0, allow_nan=False)  # minus infinity and the smallest ones too
COUNTS = st.integers(0, 2**31 - 1)
LOGPROBS = st.none() | st.lists(st.none() | st.dictionaries(COUNTS, NUMBERS, min_size=1, max_size=3), max_size=3)
REASONS = st.sampled_from(["stop", "length"])
TEXTS = st.text()
SAMPLES = st.builds(
    CompletionOutput,
    index=COUNTS,
    text=st.none() | TEXTS,
    token_ids=st.lists(COUNTS),
    finish_reason=REASONS,
    stop_reason=st.none() | COUNTS | TEXTS,
    logprobs=LOGPROBS,
    cumulative_logprob=st.none() | NUMBERS,
    score=st.none() | NUMBERS,
    seed=st.integers(0, 2**64 - 1),
)
OUTPUTS = st.builds(
    RequestOutput,
    prompt=st.none() | TEXTS,
    prompt_token_ids=st.lists(COUNTS),
    outputs=st.lists(SAMPLES, max_size=2),
    metrics=st.builds(RequestMetrics, *[st.just(0.0)] * 2, st.none() | st.floats(0, 1e9), st.floats(0, 1e9), COUNTS),
    prompt_logprobs=LOGPROBS,
    prompt_cumulative_logprob=st.none() | NUMBERS,
    num_cached_tokens=COUNTS,
    num_truncated_tokens=COUNTS,
)
CHUNKS = st.builds(
    StreamChunk,
    TEXTS,
    st.none() | COUNTS,
    st.none() | REASONS,
    COUNTS,
    st.none() | st.dictionaries(COUNTS, NUMBERS),
    LOGPROBS,
)
EVERYTHING = {
    "max_tokens": 7,
    "temperature": 0.3,
    "top_k": 9,
    "top_p": 0.5,
    "seed": 2**64 - 1,
    "stop": ["a", "b"],
    "stop_token_ids": [3],
    "logit_bias": {5: 1.5, 17: -100},
    "bad_words": "x",
    "bad_words_ids": [[1, 2], [3]],
    "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
    "eos_token_id": 4,
    "top_p_reset_ids": [9],
    "prompt_logprobs": 0,
    "overflow": "slide",
    "stride": 5,
    "best_of": 2,
}


def sent(value):
    return json.loads(json.dumps(value, allow_nan=False))


@given(OUTPUTS)
def test_an_output_comes_back_to_the_bit(output):
    found = wire.output_from_json(sent(wire.output_to_json(output)), output.prompt, 0.0)
    assert found == output
    assert repr(found) == repr(output)  # -0.0 and the order of dicts too


@given(CHUNKS)
def test_a_chunk_comes_back_to_the_bit(chunk):
    assert repr(wire.chunk_from_json(sent(wire.chunk_to_json(chunk)))) == repr(chunk)


def test_times_are_told_by_the_clock_of_who_asked():
    compiled = {"queue_compile_time": 0.25, "prefill_compile_time": 0.5, "decode_compile_time": 0.125}
    metrics = RequestMetrics(100.0, 101.0, None, 104.5, 0, **compiled)
    output = RequestOutput(None, [1], [], metrics, None, None, 0, 0)
    found = wire.output_from_json(sent(wire.output_to_json(output)), None, 7.0)
    assert found.metrics == RequestMetrics(7.0, 8.0, None, 11.5, 0, **compiled)


def test_params_say_what_is_not_usual_and_what_servers_may_see_otherwise():
    assert wire.params_to_json(SamplingParams()) == {
        "max_tokens": SamplingParams().max_tokens,
        "temperature": SamplingParams().temperature,
    }
    found = sent(wire.params_to_json(SamplingParams(**EVERYTHING)))
    assert found.keys() == EVERYTHING.keys()
    keys = {"logit_bias": {int(key): bias for key, bias in found["logit_bias"].items()}}
    assert SamplingParams(**{**found, **keys}) == SamplingParams(**EVERYTHING)
    everything = wire.params_to_json(SamplingParams(logprobs=-1, prompt_logprobs=-1))
    assert everything["logprobs"] == everything["prompt_logprobs"] == 2**31 - 1  # more than any server's limit


def test_infinity_has_a_name():
    chunk = StreamChunk("", 1, logprobs={1: -math.inf})
    assert wire.chunk_to_json(chunk)["logprobs"] == {"1": "-inf"}


@pytest.mark.parametrize(
    "field",
    [{"logits_processors": [lambda *given: given[-1]]}, {"prompt_embeds": [[0.5, 1.0]]}],
    ids=lambda f: next(iter(f)),
)
def test_what_cannot_be_sent_is_refused(field):
    with pytest.raises(RequestError, match=f"{next(iter(field))} cannot be sent to a server"):
        wire.params_to_json(SamplingParams(**field))


def test_no_field_of_an_output_is_forgotten():
    """Those that are not sent are known to who asked."""
    fields = {field.name for field in dataclasses.fields(RequestOutput)}
    output = RequestOutput("x", [1], [], RequestMetrics(0.0, 0.0, 0.0, 0.0, 0), None, None, 0, 0)
    assert fields - wire.output_to_json(output).keys() == {"prompt"}
