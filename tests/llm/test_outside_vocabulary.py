"""A tokenizer with a token that the model has no row for: a text that holds it is refused before any work."""

import pytest

from support.paths import VOCAB_SIZE
from support.tiny_checkpoint import write_with_demo_tokenizer
from tinygpt import LLM, SamplingParams
from tinygpt.errors import RequestError
from tinygpt.evaluation.tasks import lambada, perplexity

EXTRA = "<extra>"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_with_demo_tokenizer(tmp_path_factory.mktemp("extra"), {EXTRA: VOCAB_SIZE})
    with LLM(str(folder), device="reference", max_num_seqs=2) as llm:
        assert llm.tokenizer.encode(EXTRA) == [VOCAB_SIZE]
        yield llm


WAYS = {
    "a prompt": lambda llm: llm.generate(f"Once {EXTRA}", max_tokens=1),
    "the second of two": lambda llm: llm.generate(["Once", EXTRA], max_tokens=1),
    "a stream": lambda llm: llm.stream(EXTRA),
    "a context": lambda llm: llm.score(EXTRA, [" there"]),
    "a continuation": lambda llm: llm.score("Once", [EXTRA]),
    "an embedding": lambda llm: llm.embed(EXTRA),
    "a session": lambda llm: llm.session().extend(EXTRA),
    "bad words": lambda llm: llm.generate("Once", SamplingParams(max_tokens=1, bad_words=["upon", EXTRA])),
    "perplexity": lambda llm: perplexity(llm, "Once upon a time. " * 20 + EXTRA),
    "lambada": lambda llm: lambada(llm, ["Once upon a time", f"Once upon {EXTRA}"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_refused_before_any_work(llm, way):
    before = llm.engine.throughput
    with pytest.raises(RequestError, match=f"token id {VOCAB_SIZE} is outside .* and the text holds it as '{EXTRA}'"):
        WAYS[way](llm)
    assert llm.engine.throughput == before


def test_any_other_text_is_read(llm):
    params = SamplingParams(max_tokens=2, bad_words=["upon"], stop=EXTRA)
    assert len(llm.generate("Once upon a time", params)[0].outputs[0].token_ids) == 2
