"""Special tokens in texts: tokens as in transformers, or plain text where the LLM or a call says so."""

import asyncio

import numpy as np
import pytest

from support.engines import opened
from tinygpt import LLM, AsyncLLM, SamplingParams

END = "<|endoftext|>"
TEXT = f"The end.{END}Once upon a time{END}"
SHORT = SamplingParams(max_tokens=3)


splitting = opened("small_demo", split_special_tokens=True)


@pytest.fixture(scope="module")
def ids(llm) -> dict[bool, list[int]]:
    """TEXT's token ids with special tokens as tokens (False), and as plain text (True)."""
    encode = llm.tokenizer.encode
    end = llm.config.eos_token_ids[0]
    mark = encode("<|") + encode("endoftext") + encode("|>")
    assert end not in mark
    first = encode("The end.")
    second = encode("Once upon a time")
    found = {split: encode(TEXT, split_special_tokens=split) for split in (False, True)}
    assert found[False] == [*first, end, *second, end]
    assert end not in found[True]
    assert llm.tokenizer.decode(found[True], skip_special_tokens=True) == TEXT
    return found


@pytest.fixture(params=[False, True], ids=["tokens", "split"])
def case(request, llm, splitting, ids) -> tuple[LLM, list[int]]:
    return (splitting if request.param else llm), ids[request.param]


def test_every_call_reads_a_text_as_the_llm_was_told(case):
    llm, expected = case
    assert llm.generate(TEXT, SHORT)[0].prompt_token_ids == expected
    assert llm.submit(TEXT, SHORT).result().prompt_token_ids == expected
    assert asyncio.run(AsyncLLM(llm).generate(TEXT, SHORT)).prompt_token_ids == expected
    assert [c.token_id for c in llm.stream(TEXT, SHORT)] == llm.generate([expected], SHORT)[0].outputs[
        0
    ].token_ids
    assert llm.num_truncated_tokens(
        TEXT, SamplingParams(max_tokens=llm.max_model_len - 4, overflow="truncate")
    ) == (len(expected) - 4)
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


def test_a_prompt_that_has_been_read_is_itself(llm):
    prompt = llm.read_prompt(TEXT)
    assert llm.read_prompt(prompt) is prompt
