"""Tokenizers that do not fit: damaged, with more or fewer tokens than the model, or none for white space."""

import json

import numpy as np
import pytest

from support.paths import VOCAB_SIZE
from support.tiny_checkpoint import (
    copy_tokenizer,
    random_tensors,
    write_checkpoint,
    write_with_demo_tokenizer,
)
from tinygpt import LLM, SamplingParams
from tinygpt.errors import CheckpointError, RequestError
from tinygpt.evaluation.tasks import lambada, perplexity
from tinygpt.text.tokenizer import Tokenizer

IDS = [3, 1, 4]
EXTRA = "<extra>"
ROWS, POSITIONS = VOCAB_SIZE + 7, 40
PADDED = (VOCAB_SIZE, ROWS - 1)
NOT_UTF8 = "'utf-8' codec can't decode byte 0xff in position 100: invalid start byte"


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """The LLM, and what is to be said of it."""
    folder = write_with_demo_tokenizer(tmp_path_factory.mktemp("damaged"))
    (folder / "vocab.json").write_bytes((folder / "vocab.json").read_bytes()[:100] + b"\xff")
    with LLM(str(folder), device="reference", max_num_seqs=2) as llm:
        yield llm, f"{folder / 'vocab.json'} is not valid JSON ({NOT_UTF8}): download it again."


NULLS = [
    "added_tokens_decoder",
    "additional_special_tokens",
    "extra_special_tokens",
    "add_bos_token",
    "add_prefix_space",
    "tokenizer_class",
    "pad_token",
]


@pytest.mark.parametrize("name", NULLS)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_null_asks_for_nothing(tmp_path, name, file):
    folder = write_with_demo_tokenizer(tmp_path, {EXTRA: VOCAB_SIZE})
    text = f" Once{EXTRA} upon<|endoftext|>"
    expected = Tokenizer.from_folder(folder).encode(text)
    assert VOCAB_SIZE in expected
    (folder / file).write_text(json.dumps({name: None}))
    assert Tokenizer.from_folder(folder).encode(text) == expected


@pytest.mark.parametrize("name", ["do_lower_case", "tokenize_chinese_chars", "strip_accents", "cls_token"])
def test_null_asks_berts_tokenizer_for_nothing(tmp_path, name):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "once"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: None}))
    assert Tokenizer.from_folder(tmp_path).encode("Once") == [
        2,
        5,
        3,
    ]  # as transformers, if it takes the null


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """The tokenizer has a token that the model has no row for."""
    folder = write_with_demo_tokenizer(tmp_path_factory.mktemp("extra"), {EXTRA: VOCAB_SIZE})
    with LLM(str(folder), device="reference", max_num_seqs=2) as llm:
        assert llm.tokenizer.encode(EXTRA) == [VOCAB_SIZE]
        yield llm


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """The model has more rows than the tokenizer has tokens."""
    generator = np.random.default_rng(1)
    rows = {"transformer.wte.weight": ROWS, "transformer.wpe.weight": POSITIONS}
    # Small, so that what is biased alike is about as probable.
    arrays = random_tensors() | {
        name: generator.standard_normal((n, 8), np.float32) / 100 for name, n in rows.items()
    }
    folder = write_checkpoint(
        tmp_path_factory.mktemp("padded"), arrays, vocab_size=ROWS, n_positions=POSITIONS
    )
    with LLM(copy_tokenizer(folder), max_num_seqs=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def wordless(tmp_path_factory):
    """The tokenizer is GPT-1's, to which white space is nothing."""
    folder = write_checkpoint(tmp_path_factory.mktemp("wordless"), random_tensors())
    (folder / "vocab.json").write_text(json.dumps({"<unk>": 0, "a</w>": 1}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    with LLM(folder, device="reference", max_num_seqs=2) as llm:
        assert llm.tokenizer.encode(" \n") == []
        yield llm


WAYS = {
    "a prompt": lambda llm: llm.generate(f"Once {EXTRA}", max_tokens=1),
    "the second of two": lambda llm: llm.generate([IDS, EXTRA], max_tokens=1),
    "a stream": lambda llm: llm.stream(EXTRA),
    "a submitted one": lambda llm: llm.submit(EXTRA),
    "a context": lambda llm: llm.score(EXTRA, [" there"]),
    "a continuation": lambda llm: llm.score(IDS, [EXTRA]),
    "an embedding": lambda llm: llm.embed(EXTRA),
    "a session": lambda llm: llm.session().extend(EXTRA),
    "bad words": lambda llm: llm.generate([IDS], SamplingParams(bad_words=["upon", EXTRA])),
}
TASKS = {
    "perplexity": lambda llm: perplexity(llm, "Once upon a time. " * 20 + EXTRA),
    "lambada": lambda llm: lambada(llm, ["Once upon a time", f"Once upon {EXTRA}"]),
}


@pytest.mark.parametrize(
    "way", [*WAYS.values(), lambda llm: llm.tokenizer], ids=[*WAYS, "the tokenizer itself"]
)
def test_a_text_is_told_the_damaged_file_each_time(damaged, way):
    llm, said = damaged
    for _ in range(2):
        with pytest.raises(CheckpointError) as raised:
            way(llm)
        assert str(raised.value) == said


@pytest.mark.parametrize("fields", [{"stop": ["."]}, {"guided_regex": "[a-z]+"}], ids=str)
def test_a_field_that_needs_a_tokenizer_is_told_too(damaged, fields):
    llm, said = damaged
    with pytest.raises(RequestError, match="needs a tokenizer: ") as raised:
        llm.generate([IDS], SamplingParams(**fields))
    assert said in str(raised.value)


def test_token_ids_work_without_a_tokenizer(damaged):
    llm, _ = damaged
    [output] = llm.generate([IDS], max_tokens=3, ignore_eos=True, temperature=0)
    assert (len(output.outputs[0].token_ids), output.outputs[0].text) == (3, None)
    streamed = [chunk.token_id for chunk in llm.stream(IDS, max_tokens=3, ignore_eos=True, temperature=0)]
    assert streamed == output.outputs[0].token_ids
    assert np.isfinite(llm.embed([IDS])).all()
    assert len(llm.score(IDS, [[1], [5, 9]])) == 2


@pytest.mark.parametrize("way", [*WAYS.values(), *TASKS.values()], ids=[*WAYS, *TASKS])
def test_a_text_with_a_token_that_has_no_row_is_refused_before_any_work(larger, way):
    before = larger.engine.throughput
    says = (
        f"token id {VOCAB_SIZE} is outside .* ids 0 to {VOCAB_SIZE - 1}, and the text holds it as '{EXTRA}'"
    )
    with pytest.raises(RequestError, match=says):
        way(larger)
    assert larger.engine.throughput == before


def test_a_text_without_a_token_starts_at_bos(wordless):
    bos = [wordless.config.bos_token_id]
    future = wordless.submit(" \n", max_tokens=1)
    assert future.result(60).prompt_token_ids == bos
    np.testing.assert_array_equal(wordless.embed(" "), wordless.embed([bos]))
    assert [score.token_ids for score in wordless.score("a", [" "])] == [bos]


def test_any_other_text_is_read(larger):
    params = SamplingParams(max_tokens=2, bad_words=["upon"], stop=EXTRA)
    assert len(larger.generate("Once upon a time", params)[0].outputs[0].token_ids) == 2


def only(ids, **fields):
    return SamplingParams(
        temperature=1.0, logit_bias=dict.fromkeys(ids, 100.0), seed=2, ignore_eos=True, **fields
    )


def test_an_id_without_text_is_a_token_like_any_other(padded):
    params = only(PADDED, max_tokens=5, logprobs=2)
    whole = padded.generate("Once", params)[0].outputs[0]
    chunks = list(padded.stream("Once", params))
    assert set(whole.token_ids) == set(PADDED)
    assert all(
        token_id in logprobs for token_id, logprobs in zip(whole.token_ids, whole.logprobs, strict=True)
    )
    assert (whole.text, whole.finish_reason) == ("", "length")
    assert [chunk.token_id for chunk in chunks] == whole.token_ids
    assert "".join(chunk.text for chunk in chunks) == ""
    assert padded.generate([whole.token_ids], max_tokens=1)[0].prompt_token_ids == whole.token_ids


def test_ids_without_text_within_a_stop_string(padded):
    (a,) = padded.tokenizer.encode("a")
    found = padded.generate("Once", only((a, PADDED[0]), max_tokens=30, stop="aaa"))[0].outputs[0]
    assert set(found.token_ids) == {a, PADDED[0]}
    assert found.token_ids.count(a) == 3
    assert (found.text, found.finish_reason) == ("", "stop")


def test_an_id_without_text_between_the_halves_of_a_character(padded):
    halves = {padded.tokenizer.token_bytes(i): i for i in range(VOCAB_SIZE)}
    ids = [halves["é".encode()[:1]], PADDED[0], halves["é".encode()[1:]]]
    assert padded.tokenizer.decode(ids) == "é"
    stream = padded.tokenizer.detokenizer()
    assert [stream.push(i) for i in ids] == ["", "", "é"]


def test_a_guided_text_has_no_id_without_text(padded):
    pytest.importorskip("llguidance", reason="llguidance, the extra `guided`, is not installed")
    found = padded.generate("Once", only(PADDED, max_tokens=12, guided_regex="a{5,9}"))[0].outputs[0]
    assert set(found.text) == {"a"}
    assert not set(found.token_ids) & set(PADDED)
