"""`tinygpt eval rouge`: prompts and cuts of the published protocol, and ROUGE by its own package."""

import json
import sys

import pytest

from support.processes import Result
from tinygpt import LLM
from tinygpt.errors import RequestError
from tinygpt.evaluation import tasks
from tinygpt.evaluation.tasks import Article, first_sentences, prompt_of, read_articles, rouge, summarize

ROWS = [
    {
        "article": "The king did n't come home. His son waited.",
        "highlights": "The king stayed away .\nHis son waited .",
    },
    {"article": "A fox met a crow. " * 200, "summary": "A fox met a crow."},
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "articles.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    return path


def test_the_prompt_is_the_article_and_what_asks_for_a_summary():
    assert prompt_of("He did n't. ") == "He didn't.  TL;DR:"


def test_four_sentences_count():
    assert first_sentences(" A. B. C. D. E.") == " A. B. C. D."
    assert first_sentences("no end") == "no end."


def test_rows_have_either_name_for_a_summary(file):
    assert [one.summary for one in read_articles("FILE", file.read_text())] == [
        ROWS[0]["highlights"],
        ROWS[1]["summary"],
    ]


@pytest.mark.parametrize(
    "row", ['{"article": "a"}', '{"article": 3, "summary": "b"}', "[1]", "{", '{"summary": "b"}']
)
def test_a_line_that_is_no_row_is_named(row, file):
    file.write_text(json.dumps(ROWS[0]) + "\n" + row)
    with pytest.raises(RequestError, match=r"^line 2 of FILE is no article with a summary: give \{"):
        read_articles("FILE", file.read_text())


def test_the_end_of_a_long_article_is_read(file):
    """As much as the model has room for beside the summary."""
    asked = []
    with LLM("demo", device="reference") as llm:
        generate = llm.generate
        llm.generate = lambda prompts, *a, **k: asked.extend(prompts) or generate(["x"] * 2, max_tokens=1)
        summarize(llm, read_articles("FILE", file.read_text()))
        whole = llm.tokenizer.encode(prompt_of(ROWS[1]["article"]))
        assert llm.max_model_len - tasks.NEW_TOKENS < len(whole)
        assert asked[1] == whole[-(llm.max_model_len - tasks.NEW_TOKENS) :]
        assert asked[0] == llm.tokenizer.encode(prompt_of(ROWS[0]["article"]))


def test_a_model_without_room_is_refused():
    message = "the model has 100 positions"
    with (
        LLM("demo", device="reference", max_model_len=100) as llm,
        pytest.raises(RequestError, match=message),
    ):
        summarize(llm, [Article("a", "b")])


def test_without_the_package_nothing_is_loaded(file, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    result = Result(capsys, "eval", ["rouge", str(file), "--model", "/nowhere"])
    assert result.code == 2
    assert "needs the package rouge-score (No module named 'rouge_score" in result.err


def test_scores():
    pytest.importorskip("rouge_score", reason="needs rouge-score: pip install -e '.[eval]'")
    articles = [Article("", "the cat sat"), Article("", "a dog ran away")]
    same = rouge(["the cat sat", "a dog ran away"], articles)
    assert same == pytest.approx(dict.fromkeys(tasks.ROUGE_KINDS, 100.0))
    half = rouge(["the cat sat", "nothing"], articles)
    assert half == pytest.approx(dict.fromkeys(tasks.ROUGE_KINDS, 50.0))


def test_the_command(file, capsys):
    pytest.importorskip("rouge_score", reason="needs rouge-score: pip install -e '.[eval]'")
    result = Result(capsys, "eval", ["rouge", str(file), "--limit", "1", "--json"])
    record = json.loads(result.out)
    assert (record["task"], record["num_rows"]) == ("rouge", 1)
    assert all(0 <= record[kind] <= 100 for kind in tasks.ROUGE_KINDS)
