"""`tinygpt eval` and tinygpt.evaluation.tasks: the same figures as transformers' own methods give."""

import functools
import itertools
import json
import logging
import math
import random
import sys

import numpy as np
import pytest

from support.engines import opened
from support.oracles import read_model
from support.paths import DEMO, EOS
from support.recorded import recorded
from tinygpt import LLM, SamplingParams
from tinygpt.cli import main as cli
from tinygpt.errors import CheckpointError, RequestError
from tinygpt.evaluation.tasks import NUM_TOGETHER, lambada, perplexity

WORDS = "the of and a to in he was it that with had as her not old king".split()  # noqa: SIM905
SIZE = 512  # the demo's positions


def passage(num_words: int, seed: int = 0) -> str:
    generator = random.Random(seed)
    sentences = ([generator.choice(WORDS) for _ in range(8)] for _ in itertools.count())
    words = itertools.chain.from_iterable([*sentence[:-1], sentence[-1] + "."] for sentence in sentences)
    return " ".join(itertools.islice(words, num_words))


llm = opened("demo", max_num_seqs=NUM_TOGETHER)


@functools.cache
def their_model():
    import torch

    torch.set_num_threads(1)  # two that wait for each other are far slower where the cores are shared
    return read_model(DEMO)


@functools.cache
def their_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO)


@recorded
def their_ids_of(text: str, is_split: bool = False) -> np.ndarray:
    """With the special tokens in it as tokens, or as plain text."""
    return np.array(their_tokenizer()(text, split_special_tokens=is_split).input_ids, np.uint16)


@recorded
def strided(token_ids: np.ndarray, stride: int) -> np.ndarray:
    """Perplexity as transformers' documentation defines it; the model itself shifts the labels."""
    import torch

    token_ids = token_ids.astype(int)
    total = 0.0
    count = 0
    seen = 0
    for begin in range(0, len(token_ids), stride):
        stop = min(begin + SIZE, len(token_ids))
        inputs = torch.tensor([token_ids[begin:stop].tolist()])
        labels = inputs.clone()
        labels[:, : seen - begin] = -100
        weight = stop - seen - 1
        with torch.no_grad():
            total += their_model()(inputs, labels=labels).loss.item() * weight
        count, seen = count + weight, stop
        if stop == len(token_ids):
            return np.array([math.exp(total / count)])
    raise AssertionError("unreachable")


def text_of_size(llm: LLM, num_tokens: int) -> str:
    text = llm.tokenizer.decode(llm.tokenizer.encode(passage(num_tokens))[:num_tokens])
    assert len(llm.tokenizer.encode(text)) == num_tokens
    return text


@pytest.mark.parametrize(
    ("num_tokens", "stride"),
    [
        *((num_tokens, stride) for num_tokens in (1200, 300, 2) for stride in (256, SIZE, None)),
        *((300, 64), (2, 64), pytest.param(1200, 64, marks=pytest.mark.slow)),  # a dozen windows of the demo
    ],
)
def test_perplexity_is_that_of_transformers(llm, stride, num_tokens):
    text = text_of_size(llm, num_tokens)
    (expected,) = strided(their_ids_of(text), stride or SIZE)
    assert perplexity(llm, text, stride).token_perplexity == pytest.approx(expected, rel=2e-5)


def documents() -> str:
    """Six of uneven lengths, with a mark between two, at an end of the text and where a window begins."""
    return "<|endoftext|>".join(passage(60 + 70 * i, i) for i in range(6)) + "<|endoftext|>"


@pytest.mark.parametrize("is_split", [False, True])
def test_documents_are_set_apart_by_the_special_token(is_split):
    token_ids = their_ids_of(documents(), is_split)
    assert (token_ids == EOS).sum() == (0 if is_split else 6)
    with LLM("demo", split_special_tokens=is_split) as llm:
        for stride in (256, None):
            found = perplexity(llm, documents(), stride)
            assert found.num_tokens == len(token_ids)
            assert found.token_perplexity == pytest.approx(strided(token_ids, stride or SIZE)[0], rel=2e-5)


def test_lambada_reads_special_tokens_as_tokens(llm):
    check_lambada(llm, [f"{passage(9, i)}<|endoftext|>{passage(9 + i, i)}" for i in range(3)])


def test_a_window_of_nothing_new_counts_nothing(llm):
    """Where the last window has one token, Hugging Face's mean is of no tokens."""
    more, less = (perplexity(llm, text_of_size(llm, count)) for count in (SIZE + 1, SIZE))
    assert more.loss == less.loss
    assert more.num_tokens == less.num_tokens + 1


def test_words_and_bytes_share_the_loss(llm):
    text = passage(50) + " Zoë"
    found = perplexity(llm, text)
    total = found.loss * len(llm.tokenizer.encode(text))
    assert found.word_perplexity == pytest.approx(math.exp(total / 51))
    assert found.byte_perplexity == pytest.approx(math.exp(total / len(text.encode())))
    assert found.bits_per_byte == pytest.approx(total / len(text.encode()) / math.log(2))


def test_a_text_of_one_token_is_refused(llm):
    with pytest.raises(RequestError, match="less than two tokens"):
        perplexity(llm, "a")


@recorded
def foreseen(token_ids: np.ndarray, counts: tuple[int, int]) -> np.ndarray:
    """For each count: whether the last `count` tokens are what greedy decoding writes, and their log probability."""
    import torch

    ids = torch.tensor(token_ids.astype(int))
    with torch.no_grad():
        logprobs = their_model()(ids[None]).logits[0, :-1].log_softmax(-1)
    are_best = logprobs.argmax(-1) == ids[1:]
    found = logprobs[torch.arange(len(ids) - 1), ids[1:]].double()
    return np.array([(are_best[-count:].all(), found[-count:].sum()) for count in counts], np.float64)


def check_lambada(llm: LLM, texts: list[str]) -> None:
    rows = []
    for text in texts:
        token_ids = their_ids_of(text)
        rows.append(foreseen(token_ids, (len(token_ids) - len(their_ids_of(text.rsplit(" ", 1)[0])), 1)))
    of_word, of_token = lambada(llm, texts)
    assert [of_word.protocol, of_token.protocol] == ["last word", "last token"]
    for found, expected in zip((of_word, of_token), np.moveaxis(rows, 1, 0), strict=True):
        assert found.num_rows == len(texts)
        assert found.num_correct == expected[:, 0].sum()
        assert found.perplexity == pytest.approx(math.exp(-expected[:, 1].mean()), rel=1e-4)


def test_lambada_is_that_of_transformers(llm):
    (output,) = llm.generate("Once upon a time there", SamplingParams(max_tokens=40, ignore_eos=True))
    words = f"Once upon a time there{output.outputs[0].text}".split(" ")
    foreseen_texts = [" ".join(words[:count]) for count in range(8, 20)]
    rare = [
        f"{passage(20, seed)} {word}"
        for seed, word in enumerate(("unforeseeably", "xylophone", "Zoë", "the"))
    ]
    texts = [*foreseen_texts, *rare, *(passage(9 + i, i) for i in range(8))]
    check_lambada(llm, texts)
    assert len(foreseen_texts) <= lambada(llm, texts)[0].num_correct < len(texts)


def test_no_rows_are_refused(llm):
    with pytest.raises(RequestError, match="no rows"):
        lambada(llm, [])


@pytest.fixture
def run(capsys):
    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main(["eval", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def text_file(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(passage(100), encoding="utf-8")
    return file


@pytest.fixture
def rows_file(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": passage(9, i)}) + "\n" for i in range(3)), encoding="utf-8")
    return file


def test_ppl_prints_a_row_for_each_dtype(run, text_file):
    code, out, err = run("ppl", text_file, "--stride", 16, "--max-model-len", 32, "--dtype", "float32,int8")
    assert code == 0, err
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines()]
    assert head[:4] == ["dtype", "stride", "tokens", "token perplexity"]
    assert [row[0] for row in rows] == ["float32", "int8"]
    with LLM("demo", max_model_len=32) as llm:
        expected = perplexity(llm, text_file.read_text(encoding="utf-8"), 16)
    assert rows[0][3] == f"{expected.token_perplexity:.4g}"
    assert rows[0][3] != rows[1][3]
    assert float(rows[1][3]) == pytest.approx(expected.token_perplexity, rel=0.05)
    assert (head[4], rows[0][4]) == ("change", "")  # the one that the others are compared with
    change = float(rows[1][3]) / float(rows[0][3]) - 1
    assert float(rows[1][4].rstrip("%")) == pytest.approx(100 * change, abs=0.1)  # of four digits


@pytest.mark.parametrize(("dtypes", "code", "num_rows"), [("float32,int8", 1, 1), ("int8,float32", 2, 0)])
def test_a_dtype_that_cannot_be_loaded_fails_behind_others(
    run, text_file, monkeypatch, dtypes, code, num_rows
):
    """A refusal where nothing was done, and else a failure, which leaves what was measured."""

    def load(model, dtype, **options):
        if dtype == "int8":
            raise CheckpointError("damaged.")
        return LLM(model, dtype, **options)

    monkeypatch.setattr("tinygpt.llm.LLM", load)
    found, out, err = run("ppl", text_file, "--dtype", dtypes, "--format", "jsonl")
    assert found == code
    assert len(out.splitlines()) == num_rows
    assert err.endswith("tinygpt: error: damaged.\n")


def test_a_terminal_has_aligned_columns(run, text_file, monkeypatch):
    tables = {"md": run("ppl", text_file)[1], "text": run("ppl", text_file, "--format", "TEXT")[1]}
    assert tables["md"].startswith("| dtype |")
    assert tables["text"].startswith("dtype ")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run("ppl", text_file)[1] == tables["text"]
    assert run("ppl", text_file, "--format", "md")[1] == tables["md"]
    assert run("ppl", text_file, "--format", "jsonl")[1] == run("ppl", text_file, "--json")[1]


def test_json_holds_all_that_was_found(run, text_file):
    code, out, _ = run("ppl", text_file, "--json")
    assert code == 0
    (record,) = map(json.loads, out.splitlines())
    assert (record["task"], record["file"], record["dtype"]) == ("ppl", str(text_file), "float32")
    assert (record["stride"], record["max_model_len"], record["num_words"]) == (SIZE, SIZE, 100)
    assert record["token_perplexity"] == pytest.approx(math.exp(record["loss"]))


def test_a_line_of_the_log_is_shown_once(run, text_file):
    other = logging.StreamHandler(sys.stderr)  # as a package that is imported adds
    logging.root.addHandler(other)
    try:
        _, _, err = run("ppl", text_file)
    finally:
        logging.root.removeHandler(other)
    assert err.count("ppl of") == 1


def test_special_tokens_can_be_plain_text(run, llm, text_file):
    text_file.write_text(documents(), encoding="utf-8")
    counts = []
    for flags in ([], ["--no-special-tokens"]):
        code, out, _ = run("ppl", text_file, "--json", *flags)
        assert code == 0
        counts.append(json.loads(out)["num_tokens"])
    assert counts == [len(llm.tokenizer.encode(documents(), split)) for split in (False, True)]
    assert counts[0] < counts[1]


def test_lambada_names_each_protocol(run, rows_file):
    code, out, _ = run("lambada", rows_file, "--limit", 2)
    assert code == 0
    assert [line.split("|")[2:4] for line in out.splitlines()[2:]] == [
        [" last word ", " 2 "],
        [" last token ", " 2 "],
    ]
    code, out, _ = run("lambada", rows_file, "--json")
    assert [json.loads(line)["num_rows"] for line in out.splitlines()] == [3, 3]
