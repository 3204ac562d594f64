"""Where a sample ends, where its controls meet: min_tokens, stop strings, stop tokens, loops and max_tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinygpt import SamplingParams
from tinygpt.engine.sequence import is_looping

PROMPT = "Once upon a time"
LOOP = {"logit_bias": {5: 100.0}, "repetition_detection": {"max_pattern_size": 2, "min_count": 3}}


def sample_of(llm, prompt=PROMPT, **fields):
    return llm.generate([prompt], SamplingParams(**{"max_tokens": 12, **fields}))[0].outputs[0]


def end_of(sample):
    return len(sample.token_ids), sample.finish_reason, sample.stop_reason


@pytest.fixture(scope="module")
def pieces(llm):
    pieces = [llm.tokenizer.decode([token_id]) for token_id in sample_of(llm).token_ids]
    assert all(pieces)
    return pieces


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 3])
def test_a_stop_string_begun_before_min_tokens_ends_the_sample_once_it_is_complete(
    llm, pieces, min_tokens, is_kept
):
    stop = pieces[2][-1:] + pieces[3]
    sample = sample_of(llm, stop=stop, min_tokens=min_tokens, include_stop_str_in_output=is_kept)
    assert end_of(sample) == (4, "stop", stop)
    assert sample.text == "".join(pieces[:4]).removesuffix("" if is_kept else stop)


def test_a_stop_string_complete_within_min_tokens_ends_nothing(llm, pieces):
    stop = pieces[2][-1:] + pieces[3]
    assert stop not in "".join(pieces[3:])
    sample = sample_of(llm, stop=stop, min_tokens=4)
    assert (sample.text, end_of(sample)) == ("".join(pieces), (12, "length", None))


def test_a_stop_string_begun_in_the_prompt_ends_nothing(llm, pieces):
    """As in vLLM; transformers looks at the prompt's text, too."""
    assert sample_of(llm, stop=PROMPT[-1] + pieces[0]).text == "".join(pieces)


@pytest.mark.parametrize(("min_tokens", "count"), [(0, 3), (3, 3), (7, 7)])
def test_a_loop_ends_a_sample_that_has_min_tokens(llm, min_tokens, count):
    assert end_of(sample_of(llm, min_tokens=min_tokens, **LOOP)) == (count, "stop", "loop")


def test_a_loop_ends_a_beam_that_has_min_tokens(llm):
    ends = end_of(sample_of(llm, num_beams=2, min_tokens=4, **LOOP))
    assert ends == (4, "stop", "loop")


@pytest.mark.parametrize("max_tokens", [2, 3])
def test_a_loop_complete_with_the_last_token_is_a_matter_of_length(llm, max_tokens):
    assert end_of(sample_of(llm, max_tokens=max_tokens, **LOOP)) == (max_tokens, "length", None)


def test_the_end_of_text_does_not_come_before_min_tokens_even_where_it_is_ignored(llm):
    """As in vLLM."""
    fields = {"logit_bias": {5: 100.0}, "eos_token_id": 5, "ignore_eos": True, "max_tokens": 6}
    assert sample_of(llm, **fields).token_ids == [5] * 6
    token_ids = sample_of(llm, **fields, min_tokens=2).token_ids
    assert 5 not in token_ids[:2]
    assert token_ids[2:] == [5] * 4


def test_the_text_of_a_stop_token_stays_as_that_of_a_stop_string_does(llm, pieces):
    """As in vLLM."""
    stop = {"stop_token_ids": sample_of(llm).token_ids[2:3]}
    cut, kept = (sample_of(llm, **stop, include_stop_str_in_output=is_kept) for is_kept in (False, True))
    assert (cut.text, kept.text) == ("".join(pieces[:2]), "".join(pieces[:3]))
    assert end_of(cut) == end_of(kept) == (3, "stop", stop["stop_token_ids"][0])


def test_a_stop_string_that_a_kept_stop_token_completes_comes_first(llm, pieces):
    fields = {"stop_token_ids": sample_of(llm).token_ids[2:3], "stop": pieces[2][:2]}
    sample = sample_of(llm, **fields, include_stop_str_in_output=True)
    assert (sample.text, end_of(sample)) == ("".join(pieces[:2]) + pieces[2][:2], (3, "stop", pieces[2][:2]))
    cut = sample_of(llm, **fields)
    assert (cut.text, end_of(cut)) == ("".join(pieces[:2]), (3, "stop", fields["stop_token_ids"][0]))


def test_the_end_of_text_has_no_text_to_keep(llm):
    (eos,) = llm.config.eos_token_ids
    sample = sample_of(llm, logit_bias={eos: 100.0}, include_stop_str_in_output=True)
    assert (sample.text, end_of(sample)) == ("", (1, "stop", eos))


@pytest.mark.parametrize("is_skipped", [True, False])
def test_special_tokens_may_stay_in_the_text(llm, is_skipped):
    (eos,) = llm.config.eos_token_ids
    fields = {"logit_bias": {eos: 100.0}, "max_tokens": 2, "skip_special_tokens": is_skipped}
    name = "" if is_skipped else llm.tokenizer.decode([eos])
    assert sample_of(llm, **fields, ignore_eos=True).text == 2 * name
    assert sample_of(llm, **fields).text == ""
    assert sample_of(llm, **fields, include_stop_str_in_output=True).text == name
    assert "".join(chunk.text for chunk in llm.stream("a", **fields, ignore_eos=True)) == 2 * name


def test_a_stop_string_that_cut_the_last_text_is_the_reason_whatever_ended_the_sample(llm):
    """Half a character becomes U+FFFD when no more comes."""
    half = next(i for i in range(256) if not llm.tokenizer.detokenizer().push(i))
    assert llm.tokenizer.decode([half]) == "\ufffd"
    other = llm.tokenizer.encode("!")[0]
    end = {"logits_processors": lambda prompt, new, scores: _only(scores, other if new else half)}
    for ending in ({"stop_token_ids": [other]}, {"max_tokens": 1}):
        sample = sample_of(llm, **end, **ending, stop="\ufffd")
        assert (sample.text, sample.finish_reason, sample.stop_reason) == ("", "stop", "\ufffd")


def _only(scores, token_id):
    scores[:] = -1e4
    scores[token_id] = 0
    return scores


def detecting(max_pattern_size, min_count, min_pattern_size=1):
    fields = {
        "max_pattern_size": max_pattern_size,
        "min_count": min_count,
        "min_pattern_size": min_pattern_size,
    }
    return SamplingParams(repetition_detection=fields)


@given(st.lists(st.integers(0, 2), max_size=14), st.integers(1, 4), st.integers(1, 4), st.integers(2, 4))
def test_any_tokens(token_ids, one_size, other_size, count):
    least, most = sorted((one_size, other_size))
    endings = [
        token_ids[len(token_ids) - size :] * count
        for size in range(least, most + 1)
        if size <= len(token_ids)
    ]
    expected = any(token_ids[-len(ending) :] == ending for ending in endings)
    assert is_looping(token_ids, detecting(most, count, least)) == expected
    assert not is_looping(token_ids, SamplingParams())
