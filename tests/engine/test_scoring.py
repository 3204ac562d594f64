"""Label scoring: the probabilities of teacher forcing, and token ids as evaluation harnesses have them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines import batches_of, log_softmax
from support.paths import VOCAB_SIZE as V
from support.tiny_checkpoint import write_checkpoint
from tinygpt import LLM
from tinygpt.errors import RequestError
from tinygpt.outputs import ContinuationScore

LABELS = [" man", " woman who lived in a", ", fish", " the"]
PROMPT = "Once upon a time, in a house by the sea, there was a"


def teacher_forced(llm: LLM, context: list[int], continuation: list[int]) -> tuple[np.ndarray, bool]:
    """Of each token of the continuation its log probability; and whether each is the most probable."""
    logprobs = log_softmax(llm.logits(context + continuation)[len(context) - 1 : -1])  # (T, V)
    return logprobs[np.arange(len(continuation)), continuation], logprobs.argmax(-1).tolist() == continuation


def test_scores_are_those_of_teacher_forcing(llm):
    context = llm.tokenizer.encode(PROMPT)
    for label, score in zip(LABELS, llm.score(PROMPT, LABELS), strict=True):
        assert score.token_ids == llm.tokenizer.encode(PROMPT + label)[len(context) :]
        expected, is_greedy = teacher_forced(llm, context, score.token_ids)
        np.testing.assert_allclose(score.logprobs, expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(score.cumulative_logprob, expected.sum(), rtol=0, atol=1e-4)
        np.testing.assert_allclose(score.mean_logprob, expected.mean(), rtol=0, atol=1e-5)
        assert score.is_greedy == is_greedy


def test_what_greedy_decoding_writes_is_greedy(llm):
    context = llm.tokenizer.encode(PROMPT)
    (output,) = llm.generate([context], max_tokens=8, ignore_eos=True, logprobs=0)
    written = output.outputs[0].token_ids
    same, other = llm.score(context, [written, [*written[:-1], (written[-1] + 1) % V]])
    assert (same.is_greedy, other.is_greedy) == (True, False)
    assert same.logprobs == [
        row[token_id] for row, token_id in zip(output.outputs[0].logprobs, written, strict=True)
    ]


def harness_pair(encode, context: str, continuation: str) -> tuple[list[int], list[int]]:
    num_spaces = len(context) - len(context.rstrip())
    if num_spaces:
        continuation = context[-num_spaces:] + continuation
        context = context[:-num_spaces]
    whole = encode(context + continuation)
    first = encode(context)
    return first, whole[len(first) :]


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT + " ", "A\n\n", "Question: 2+2?\nAnswer:  "])
@pytest.mark.parametrize("label", [" man", "\n", ", 4", "4."])
def test_texts_are_encoded_as_harnesses_do(llm, prompt, label):
    context, continuation = harness_pair(llm.tokenizer.encode, prompt, label)
    (score,) = llm.score(prompt, [label])
    assert score.token_ids == continuation
    np.testing.assert_allclose(
        score.logprobs, teacher_forced(llm, context, continuation)[0], rtol=0, atol=1e-5
    )


def test_where_the_border_vanishes_both_are_encoded_apart(llm):
    encode = llm.tokenizer.encode
    first, second = "Once upon a ti", "me"
    assert encode(first + second)[: len(encode(first))] != encode(first)
    (score,) = llm.score(first, [second])
    assert score.token_ids == encode(second)
    np.testing.assert_allclose(
        score.logprobs, teacher_forced(llm, encode(first), encode(second))[0], rtol=0, atol=1e-5
    )


def test_facts_of_a_score():
    score = ContinuationScore([1, 2, 3], [-1.0, -2.0, -0.5], False, ["He", " wa", "s"])
    assert score.perplexity == pytest.approx(math.exp(3.5 / 3))
    assert score.surprisals == pytest.approx([1 / math.log(2), 2 / math.log(2), 0.5 / math.log(2)])
    assert score.bits_per_byte == pytest.approx(3.5 / math.log(2) / 6)
    assert score.words == [("He", -1.0, 1), (" was", -2.5, 2)]
    assert ContinuationScore([1], [-math.inf], False, [""]).perplexity == math.inf
    assert ContinuationScore([1], [-1000.0], False).perplexity == math.inf
    assert (
        ContinuationScore([1], [-1.0], False).words
        is ContinuationScore([1], [-1.0], False).bits_per_byte
        is None
    )


@pytest.mark.parametrize("text", [PROMPT, "caf\u00e9 \u2014 \U0001f600\n", "a<|endoftext|> b"])
def test_the_tokens_of_a_score_are_its_text(llm, text):
    (score,) = llm.score("", [text])
    assert len(score.tokens) == len(score.token_ids)
    assert "".join(score.tokens) == text


def test_a_score_may_end_within_a_character(llm):
    (score,) = llm.score("a", [llm.tokenizer.encode("b\u2014")[:-1]])
    assert score.tokens == ["b", *[""] * (len(score.token_ids) - 2), "\ufffd"]


def test_without_a_tokenizer_scores_have_no_texts(tmp_path):
    with LLM(write_checkpoint(tmp_path / "tiny")) as llm:
        (score,) = llm.score([1], [[2, 3]])
    assert (score.tokens, score.words, score.bits_per_byte) == (None, None, None)


@pytest.mark.parametrize("prompt", ["", "  "])
def test_an_empty_prompt_is_the_bos_token(llm, prompt):
    (score,) = llm.score(prompt, ["Once"])
    expected = teacher_forced(llm, [llm.config.bos_token_id], llm.tokenizer.encode(prompt + "Once"))[0]
    np.testing.assert_allclose(score.logprobs, expected, rtol=0, atol=1e-5)


def test_the_prompt_is_read_once(monkeypatch, small_demo):
    context = np.random.default_rng(0).integers(V, size=100).tolist()
    with LLM(small_demo, max_num_seqs=2) as llm:
        batches = batches_of(llm, monkeypatch)
        llm.score(context, [[1], [2, 3], [4, 5, 6], [7]])
    # The prompt's last token again for each, whose logits they want, and of no continuation the last.
    assert sum(batch.token_ids.size for batch in batches) == 100 + (1 + 1) + (1 + 2) + 1
    assert sum(batch.logit_rows.size for batch in batches) == 1 + 2 + 3 + 1


ids = st.lists(st.integers(0, V - 1), min_size=1, max_size=5)


@given(context=ids, prefix=st.sampled_from([0, 30, 90]), labels=st.lists(ids, min_size=1, max_size=6))
@settings(max_examples=15)
def test_neighbours_change_nothing(llm, alone, context, prefix, labels):
    context = list(range(prefix)) + context
    together = llm.score(context, labels)
    assert together == [alone.score(context, [label])[0] for label in labels]


def test_the_last_token_needs_no_position(small_demo):
    with LLM(small_demo, max_model_len=20) as llm:
        (score,) = llm.score([5] * 11, [[6] * 10])
        with LLM(small_demo) as longer:
            assert score == longer.score([5] * 11, [[6] * 10])[0]
        with pytest.raises(
            RequestError, match=r"11 tokens and a continuation 11, together 22.*shorten them to 21"
        ):
            llm.score([5] * 11, [[6], [6] * 11])


def test_pieces_joined_are_the_text(llm):
    """Also if a special token follows half a character."""
    special = llm.tokenizer.eos_token_id
    for ids in ([168, 167, special], [168, special, 168, 167], [special, 40, 168]):
        assert "".join(llm.tokenizer.pieces(ids)) == llm.tokenizer.decode(ids)
