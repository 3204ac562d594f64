"""Sessions: what is written in turns is what a whole list of tokens gives, computed once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines import batches_of, opened
from support.gate import paused
from support.paths import EOS
from tinygpt import LLM, SamplingParams
from tinygpt.errors import RequestError

TEXT = np.random.default_rng(2).integers(EOS, size=60).tolist()
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1, seed=3)
SAMPLED = SamplingParams(
    max_tokens=4, temperature=1.0, repetition_penalty=1.2, ignore_eos=True, logprobs=0, seed=3
)


llm = opened("small_demo", max_num_seqs=2, prefix_cache_seqs=2)


@pytest.fixture
def batches(llm, monkeypatch, single_steps):
    return batches_of(llm, monkeypatch)


def num_tokens(batches) -> int:
    return sum(batch.token_ids.size for batch in batches)


def test_a_turn_computes_what_is_new(llm, alone, batches):
    session = llm.session()
    session.extend(TEXT[:40])
    first = session.generate(PARAMS)
    assert session.token_ids == TEXT[:40] + first.outputs[0].token_ids
    session.extend(TEXT[40:43])
    batches.clear()
    second = session.generate(PARAMS)
    assert num_tokens(batches) == 1 + 3 + 5  # the last of the first turn, the new, all but the last that came
    assert (
        second.outputs
        == alone.generate([TEXT[:40] + first.outputs[0].token_ids + TEXT[40:43]], PARAMS)[0].outputs
    )


actions = st.one_of(
    st.tuples(st.just("extend"), st.lists(st.integers(0, EOS - 1), max_size=4)),
    st.tuples(st.just("generate"), st.sampled_from([PARAMS, SAMPLED])),
    st.tuples(st.just("stream"), st.sampled_from([PARAMS, SAMPLED])),
    st.tuples(st.just("rewind"), st.floats(0, 1)),
    st.tuples(st.just("fork"), st.none()),
    st.tuples(st.just("others"), st.integers(1, 3)),
)


@given(script=st.lists(st.tuples(st.integers(0, 2), actions), max_size=14))
@settings(max_examples=20)
def test_any_turns_equal_the_whole_list_again(llm, alone, script):
    sessions, expected = [llm.session()], [[]]
    for which, (action, value) in script:
        i = which % len(sessions)
        if action == "extend":
            sessions[i].extend(value)
            expected[i] += value
        elif action == "rewind":
            position = round(value * len(expected[i]))
            sessions[i].rewind(position)
            del expected[i][position:]
        elif action == "fork":
            sessions.append(sessions[i].fork())
            expected.append(list(expected[i]))
        elif action == "others":
            llm.generate([[value] * 30] * value, PARAMS)
        else:
            (output,) = alone.generate([expected[i]], value)
            if action == "generate":
                assert sessions[i].generate(value).outputs == output.outputs
            else:
                chunks = list(sessions[i].stream(value))
                assert "".join(chunk.text for chunk in chunks) == output.outputs[0].text
            expected[i] = output.prompt_token_ids + output.outputs[0].token_ids
        assert [session.token_ids for session in sessions] == expected


def test_a_text_is_encoded_by_itself(llm):
    session = llm.session()
    session.extend("Once upon a ti")
    session.extend("me")
    encode = llm.tokenizer.encode
    assert session.token_ids == encode("Once upon a ti") + encode("me") != encode("Once upon a time")
    assert session.text == "Once upon a time"
    session.extend("")
    session.extend([])
    assert session.text == "Once upon a time"


def test_a_stream_that_is_closed_keeps_what_it_gave(llm, alone):
    session = llm.session()
    session.extend(TEXT[:5])
    stream = session.stream(PARAMS)
    given = [next(stream).token_id for _ in range(3)]
    stream.close()
    assert session.token_ids == TEXT[:5] + given
    with paused(llm):
        assert llm.engine.scheduler.running == []
    assert session.generate(PARAMS).outputs == alone.generate([TEXT[:5] + given], PARAMS)[0].outputs


@pytest.mark.parametrize("num_read", [0, 2])
@pytest.mark.parametrize(
    "change",
    [
        lambda session: (session.rewind(3), session.extend([7, 8])),
        lambda session: (session.generate(PARAMS), session.rewind(5)),
        lambda session: next(session.stream(PARAMS)),
    ],
    ids=["rewind-extend", "generate", "stream"],
)
def test_a_change_is_seen_whatever_the_length(llm, change, num_read):
    session = llm.session()
    session.extend(TEXT[: 5 - num_read])
    stream = session.stream(PARAMS)
    for _ in range(num_read):
        next(stream)
    change(session)
    after = session.token_ids
    with pytest.raises(RequestError, match="changed while it streamed"):
        next(stream)
    assert session.token_ids == after


def test_a_stop_text_and_what_ended_it_belong_to_the_session(llm):
    session = llm.session()
    session.extend(TEXT[:5])
    output = session.generate(SamplingParams(max_tokens=20, stop="e", ignore_eos=True))
    assert output.outputs[0].finish_reason == "stop"
    assert session.token_ids == TEXT[:5] + output.outputs[0].token_ids


def test_what_is_refused_adds_nothing(llm):
    session = llm.session()
    session.extend(TEXT[:5])
    for call, message in (
        (lambda: session.generate(SamplingParams(n=2)), "n is 2 and a session goes on with one sample"),
        (lambda: session.generate(SamplingParams(max_tokens=5000)), "prompt has 5 tokens"),
        (lambda: session.stream(SamplingParams(max_tokens=5000)), "prompt has 5 tokens"),
        (lambda: session.extend([1, 9999]), "token id 9999 is outside the vocabulary"),
        (lambda: session.extend(7), "must be a text or a list of token ids"),
        (lambda: session.rewind(6), "position is 6 and must be a whole number from 0 to 5"),
        (lambda: session.rewind(-1), "position is -1"),
    ):
        with pytest.raises(RequestError, match=message):
            call()
        assert session.token_ids == TEXT[:5]
    with session:
        pass
    with pytest.raises(RequestError, match="this session has been closed"):
        session.generate()


def test_a_session_that_slides_goes_on_where_it_was(small_demo):
    params = SamplingParams(max_tokens=20, ignore_eos=True, overflow="slide", stride=7, logprobs=0, seed=0)
    sizes = {"max_model_len": 24, "max_num_seqs": 1}
    with (
        LLM(small_demo, prefix_cache_seqs=1, **sizes) as llm,
        LLM(small_demo, prefix_cache_seqs=0, **sizes) as alone,
    ):
        session = llm.session()
        session.extend(TEXT[:10])
        for _ in range(5):
            (expected,) = alone.generate([session.token_ids], params)
            output = session.generate(params)
            assert output.outputs == expected.outputs
        assert output.num_truncated_tokens > 0
        assert output.num_cached_tokens > 0
        assert len(session) == 110


def test_a_session_finds_the_prefix_of_another_request(llm, batches):
    llm.generate([TEXT[:40]], PARAMS)
    session = llm.session()
    session.extend(TEXT[:40])
    batches.clear()
    assert session.generate(PARAMS).num_cached_tokens == 39
    assert num_tokens(batches) == 1 + 5
