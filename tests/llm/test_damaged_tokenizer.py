"""A damaged tokenizer beside whole weights: token ids work, and the first text is told which file, and what to do."""

import numpy as np
import pytest

from support.tiny_checkpoint import write_with_demo_tokenizer
from tinygpt import LLM, SamplingParams
from tinygpt.errors import CheckpointError, RequestError

IDS = [3, 1, 4]
NOT_UTF8 = "'utf-8' codec can't decode byte 0xff in position 100: invalid start byte"


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """The LLM, and what is to be said of it."""
    folder = write_with_demo_tokenizer(tmp_path_factory.mktemp("damaged"))
    (folder / "vocab.json").write_bytes((folder / "vocab.json").read_bytes()[:100] + b"\xff")
    with LLM(str(folder), device="reference", max_num_seqs=2) as llm:
        yield llm, f"{folder / 'vocab.json'} is not valid JSON ({NOT_UTF8}): download it again."


WAYS = {
    "a prompt": lambda llm: llm.generate("Once", max_tokens=1),
    "the second of two": lambda llm: llm.generate([IDS, "Once"], max_tokens=1),
    "a stream": lambda llm: llm.stream("Once"),
    "a submitted one": lambda llm: llm.submit("Once"),
    "a context": lambda llm: llm.score("Once", [" there"]),
    "a continuation": lambda llm: llm.score(IDS, [" there"]),
    "an embedding": lambda llm: llm.embed("Once"),
    "a session": lambda llm: llm.session().extend("Once"),
    "bad words": lambda llm: llm.generate([IDS], SamplingParams(bad_words=["upon"])),
    "the tokenizer itself": lambda llm: llm.tokenizer,
}
# What says besides for what it needs a tokenizer.
NEEDS = {
    "stop": {"stop": ["."]},
    "guided_regex": {"guided_regex": "[a-z]+"},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_text_is_told_the_file_each_time(damaged, way):
    llm, said = damaged
    for _ in range(2):
        with pytest.raises(CheckpointError) as raised:
            WAYS[way](llm)
        assert str(raised.value) == said


@pytest.mark.parametrize("field", NEEDS)
def test_what_needs_a_tokenizer_for_ids_is_told_too(damaged, field):
    llm, said = damaged
    with pytest.raises(RequestError, match="needs a tokenizer: ") as raised:
        llm.generate([IDS], SamplingParams(**NEEDS[field]))
    assert said in str(raised.value)


def test_token_ids_work(damaged):
    llm, _ = damaged
    [output] = llm.generate([IDS], max_tokens=3, ignore_eos=True, temperature=0)
    assert (len(output.outputs[0].token_ids), output.outputs[0].text) == (3, None)
    streamed = [chunk.token_id for chunk in llm.stream(IDS, max_tokens=3, ignore_eos=True, temperature=0)]
    assert streamed == output.outputs[0].token_ids
    assert np.isfinite(llm.embed([IDS])).all()
    assert len(llm.score(IDS, [[1], [5, 9]])) == 2
