"""A model with more rows than its tokenizer has tokens: ids without text may be sampled, and harm nothing."""

import numpy as np
import pytest

from support.paths import DEMO, VOCAB_SIZE
from support.tiny_checkpoint import random_tensors, write_checkpoint
from tinygpt import LLM, SamplingParams

ROWS, POSITIONS = VOCAB_SIZE + 7, 40
PADDED = (VOCAB_SIZE, ROWS - 1)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    generator = np.random.default_rng(1)
    rows = {"transformer.wte.weight": ROWS, "transformer.wpe.weight": POSITIONS}
    # Small, so that what is biased alike is about as probable.
    arrays = random_tensors() | {name: generator.standard_normal((n, 8), np.float32) / 100 for name, n in rows.items()}
    folder = write_checkpoint(tmp_path_factory.mktemp("padded"), arrays, vocab_size=ROWS, n_positions=POSITIONS)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_bytes((DEMO / name).read_bytes())
    with LLM(folder, max_num_seqs=2) as llm:
        yield llm


def only(ids, **fields):
    """Nothing but these, at random."""
    return SamplingParams(temperature=1.0, logit_bias=dict.fromkeys(ids, 100.0), seed=2, ignore_eos=True, **fields)


def test_an_id_without_text_is_a_token_like_any_other(llm):
    params = only(PADDED, max_tokens=5, logprobs=2)
    whole, chunks = llm.generate("Once", params)[0].outputs[0], list(llm.stream("Once", params))
    assert set(whole.token_ids) == set(PADDED)
    assert all(token_id in logprobs for token_id, logprobs in zip(whole.token_ids, whole.logprobs, strict=True))
    assert (whole.text, whole.finish_reason) == ("", "length")
    assert [chunk.token_id for chunk in chunks] == whole.token_ids
    assert "".join(chunk.text for chunk in chunks) == ""
    assert llm.generate([whole.token_ids], max_tokens=1)[0].prompt_token_ids == whole.token_ids


def test_ids_without_text_within_a_stop_string(llm):
    (a,) = llm.tokenizer.encode("a")
    found = llm.generate("Once", only((a, PADDED[0]), max_tokens=30, stop="aaa"))[0].outputs[0]
    assert set(found.token_ids) == {a, PADDED[0]}
    assert found.token_ids.count(a) == 3
    assert (found.text, found.finish_reason) == ("", "stop")


def test_one_between_the_halves_of_a_character(llm):
    halves = {llm.tokenizer.token_bytes(i): i for i in range(VOCAB_SIZE)}
    ids = [halves["é".encode()[:1]], PADDED[0], halves["é".encode()[1:]]]
    assert llm.tokenizer.decode(ids) == "é"
    stream = llm.tokenizer.detokenizer()
    assert [stream.push(i) for i in ids] == ["", "", "é"]


def test_a_guided_text_has_none_of_them(llm):
    pytest.importorskip("llguidance", reason="llguidance, the extra `guided`, is not installed")
    found = llm.generate("Once", only(PADDED, max_tokens=12, guided_regex="a{5,9}"))[0].outputs[0]
    assert set(found.text) == {"a"}
    assert not set(found.token_ids) & set(PADDED)
