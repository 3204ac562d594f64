"""Special tokens in texts: tokens as in transformers, or plain text where the LLM or a call says so."""

import asyncio

import numpy as np
import pytest

from support.demo import VOCAB_SIZE
from tinygpt import LLM, AsyncLLM, SamplingParams
from tinygpt.errors import RequestError
from tinygpt.tokenizer.tokenizer import Tokenizer

END = "<|endoftext|>"
TEXT = f"The end.{END}Once upon a time{END}"
SHORT = SamplingParams(max_tokens=3)


@pytest.fixture(scope="module")
def llm(small_demo):
    with LLM(small_demo) as llm:
        yield llm


@pytest.fixture(scope="module")
def splitting(small_demo):
    with LLM(small_demo, split_special_tokens=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def ids(llm) -> dict[bool, list[int]]:
    """TEXT's token ids with special tokens as tokens (False), and as plain text (True)."""
    encode, end = llm.tokenizer.encode, llm.config.eos_token_ids[0]
    mark = encode("<|") + encode("endoftext") + encode("|>")
    assert end not in mark
    first, second = encode("The end."), encode("Once upon a time")
    found = {split: encode(TEXT, split_special_tokens=split) for split in (False, True)}
    assert found[False] == [*first, end, *second, end]
    assert end not in found[True]
    assert llm.tokenizer.decode(found[True], skip_special_tokens=True) == TEXT
    return found


@pytest.fixture(params=[False, True], ids=["tokens", "split"])
def case(request, llm, splitting, ids) -> tuple[LLM, list[int]]:
    """An LLM, and what it should make of TEXT where it is told nothing more."""
    return (splitting if request.param else llm), ids[request.param]


def test_every_call_reads_a_text_as_the_llm_was_told(case):
    llm, expected = case
    assert llm.generate(TEXT, SHORT)[0].prompt_token_ids == expected
    assert llm.submit(TEXT, SHORT).result().prompt_token_ids == expected
    assert asyncio.run(AsyncLLM(llm).generate(TEXT, SHORT)).prompt_token_ids == expected
    assert [c.token_id for c in llm.stream(TEXT, SHORT)] == llm.generate([expected], SHORT)[0].outputs[0].token_ids
    assert llm.num_truncated_tokens(TEXT, SamplingParams(max_tokens=llm.max_model_len - 4, overflow="truncate")) == (
        len(expected) - 4
    )
    np.testing.assert_array_equal(llm.embed(TEXT), llm.embed([expected]))
    np.testing.assert_array_equal(llm.logits(TEXT), llm.logits(expected))
    assert llm.score(TEXT, [" The"]) == llm.score(expected, [llm.tokenizer.encode(" The")])
    assert llm.score("Once", [TEXT])[0].token_ids == expected
    session = llm.session()
    session.extend(TEXT)
    assert session.token_ids == expected


def test_a_call_can_say_otherwise(llm, splitting, ids):
    for one, split in ((llm, True), (splitting, False)):
        prompt = one.read_prompt(TEXT, split_special_tokens=split)
        assert (prompt.text, prompt.token_ids) == (TEXT, ids[split])
        assert one.generate(prompt, SHORT)[0].prompt_token_ids == ids[split]
        np.testing.assert_array_equal(one.embed([prompt]), one.embed([ids[split]]))
        assert one.score("Once", [TEXT], split_special_tokens=split)[0].token_ids == ids[split]
        assert one.score(TEXT, [" A"], split_special_tokens=split) == one.score(
            ids[split], [one.tokenizer.encode(" A")]
        )
        session = one.session()
        session.extend(TEXT, split_special_tokens=split)
        session.extend("", split_special_tokens=split)
        assert session.token_ids == ids[split]


def test_the_mark_alone_is_the_unconditional_prompt(llm):
    marked, empty = llm.generate([END, ""], SHORT)
    assert marked.prompt_token_ids == empty.prompt_token_ids == [llm.config.bos_token_id]
    assert marked.outputs[0].token_ids == empty.outputs[0].token_ids


def test_token_ids_stay_what_they_are(splitting):
    end = splitting.config.eos_token_ids[0]
    assert splitting.read_prompt([5, end], split_special_tokens=True).token_ids == [5, end]
    assert splitting.generate([[5, end]], SHORT)[0].prompt_token_ids == [5, end]


def test_bad_words_are_read_as_prompts_are(case):
    """After "a" the mark's token may not come, though it is made certain: or may, where it is no token in texts."""
    llm, _ = case
    end = llm.config.eos_token_ids[0]
    params = {"max_tokens": 2, "logit_bias": {end: 100.0}, "ignore_eos": True}
    free = llm.generate("Once", SamplingParams(**params))[0].outputs[0].token_ids
    barred = llm.generate("Once", SamplingParams(bad_words=[f"a{END}", "b"], **params))[0].outputs[0].token_ids
    assert free == barred == [end, end]
    (a,) = llm.tokenizer.encode("a")
    barred = llm.generate([[5, a]], SamplingParams(bad_words=[f"a{END}"], **params))[0].outputs[0].token_ids
    assert (barred[0] == end) == llm.tokenizer.split_special_tokens


def test_a_mark_in_plain_text_can_be_a_stop_string(llm):
    """A stop string is looked for in the text, where special tokens have none."""
    mark = llm.tokenizer.encode(END, split_special_tokens=True)
    for stop_at, token_ids in ((True, mark), (False, [llm.config.eos_token_ids[0]] * len(mark))):
        forced = iter(token_ids)

        def only_the_next(prompt, new, scores, forced=forced):
            scores[:] = -np.inf
            scores[next(forced)] = 0
            return scores

        params = SamplingParams(max_tokens=len(token_ids), stop=END, ignore_eos=True, logits_processors=[only_the_next])
        sample = llm.generate("Once", params)[0].outputs[0]
        assert (sample.text, sample.finish_reason) == ("", "stop" if stop_at else "length")


@pytest.mark.parametrize("given", ["no", 1, None])
def test_a_switch_that_is_none_is_refused(llm, given):
    with pytest.raises(RequestError, match=f"split_special_tokens is {given!r} and must be True or False"):
        LLM("demo", split_special_tokens=given)
    if given is not None:
        with pytest.raises(RequestError, match="must be True or False"):
            llm.read_prompt("Once", split_special_tokens=given)
        with pytest.raises(RequestError, match="must be True or False"):
            llm.read_prompt([5], split_special_tokens=given)


def test_a_prompt_that_has_been_read_cannot_be_split(llm):
    prompt = llm.read_prompt(TEXT)
    assert llm.read_prompt(prompt) is prompt
    with pytest.raises(RequestError, match="has been read already: give its text"):
        llm.read_prompt(prompt, split_special_tokens=True)


def test_a_special_token_that_the_model_does_not_have_is_named(llm, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, split: [5, llm.config.vocab_size])
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: "<pad>" * len(ids))
    says = f"token id {VOCAB_SIZE} is outside .* ids 0 to {VOCAB_SIZE - 1}, and the text holds it as '<pad>'"
    with pytest.raises(RequestError, match=says):
        llm.generate("Once<pad>", SHORT)
