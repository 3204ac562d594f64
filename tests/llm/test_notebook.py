"""An output and a progress bar in a notebook."""

import io
import math
import pickle
import re
import sys
from html.parser import HTMLParser

import pytest

from support.engines import opened
from tinygpt.look.html import PAGE
from tinygpt.outputs import with_bar

TEXT = "Once <b>upon</b> a time &amp;"


class Marks(HTMLParser):
    """The text, and (text, bits, title) of each token."""

    def __init__(self, html: str):
        super().__init__()
        self.text = ""
        self.tokens = []
        self.tags = []
        self._open = None
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._open = dict(attributes)

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self.tags[-1] == "style":
            return
        self.text += data
        if self._open and self._open.get("class") == "token":
            bits = float(self._open["style"].removeprefix("--bits: "))
            self.tokens.append((data, bits, self._open["title"]))


llm = opened("demo")


def test_a_special_token_of_a_prompt_has_its_name(llm):
    prompt = "Hi<|endoftext|>Once upon"
    [output] = llm.generate([prompt], max_tokens=2, prompt_logprobs=0)
    assert [text for text, *_ in Marks(output._repr_html_()).tokens] == ["<|endoftext|>", "Once", " upon"]


def test_tokens_are_colored_by_surprisal_with_candidates_as_titles(llm):
    [output] = llm.generate([TEXT], max_tokens=12, logprobs=3, prompt_logprobs=2, seed=1, temperature=1)
    html = output._repr_html_()
    sample = output.outputs[0]
    marks = Marks(html)
    assert marks.text == TEXT + sample.text
    assert html.count("<") == 2 * len(marks.tags)  # texts are escaped
    pairs = [*zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)][1:]
    pairs += zip(sample.token_ids, sample.logprobs, strict=True)
    assert len(marks.tokens) == len(pairs)
    for (text, bits, title), (token_id, found) in zip(marks.tokens, pairs, strict=True):
        assert text == llm.tokenizer.decode([token_id])
        assert bits == pytest.approx(min(12.5, -found[token_id] / math.log(2)), abs=0.006)
        _, *rows = title.splitlines()
        shares = [float(row.partition("%")[0]) for row in rows]
        assert shares == pytest.approx([100 * math.exp(value) for value in found.values()], abs=0.006)
        assert [row.partition("% ")[2] for row in rows] == [repr(llm.tokenizer.decode([i])) for i in found]


def test_the_colors_are_the_pages(llm):
    html = llm.generate("Once", max_tokens=2, logprobs=0)[0]._repr_html_()
    [style] = re.findall("<style>(.*?)</style>", html, re.DOTALL)
    page = PAGE.read_text(encoding="utf-8")
    assert style.strip() in page
    assert {"--warm", "--hot", "--hue", "--heat"} <= set(re.findall(r"--\w+", style))
    assert style.count("{") == style.count("}") >= 3


def test_without_log_probabilities_the_text_is_plain(llm):
    output = llm.generate([TEXT], max_tokens=4, n=2, seed=1, temperature=1)[0]
    copy = pickle.loads(pickle.dumps(output))  # has no tokenizer
    for found in (output, copy):
        marks = Marks(found._repr_html_())
        assert marks.tags == ["style", "div", "div"]
        assert marks.text == "".join(TEXT + sample.text for sample in output.outputs)


def test_a_copy_has_no_tokenizer_and_is_equal(llm):
    output = llm.generate("Once", max_tokens=2, logprobs=1)[0]
    copy = pickle.loads(pickle.dumps(output))
    assert copy == output
    assert len(pickle.dumps(output)) < 2000
    assert Marks(output._repr_html_()).tokens
    assert Marks(copy._repr_html_()).text == "Once" + output.outputs[0].text


def test_the_bar_is_tqdms_of_the_place(monkeypatch):
    """In a notebook a bar needs no terminal."""
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("tqdm.auto.tqdm", lambda items, total, unit: screen.write(f"{total}{unit}") and items)
    assert [*with_bar([1, 2], 2, None)] == [1, 2]
    assert screen.getvalue() == ""
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert [*with_bar([1, 2], 2, None)] == [1, 2]
    assert screen.getvalue() == "2 prompts"
