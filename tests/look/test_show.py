"""A lens and attention patterns: their numbers, and what notebooks show."""

import math
import re
from html import unescape
from xml.etree import ElementTree

import numpy as np
import pytest

from support.engines import log_softmax, opened
from tinygpt import Edit
from tinygpt.errors import RequestError
from tinygpt.look.html import SHADES, attention, lens

TEXT = 'Once <b>upon</b> a "time" &amp;'


llm = opened("demo", device="reference")


@pytest.mark.parametrize("edits", [(), (Edit("blocks.1.hook_mlp_out", keep=0),)], ids=["plain", "edited"])
def test_the_last_stream_has_the_models_probabilities(llm, edits):
    found = lens(llm, TEXT, top=4, edits=edits)
    ids = llm.tokenizer.encode(TEXT)
    probs = np.exp(log_softmax(llm.logits(ids, edits)))
    assert "".join(found.tokens) == TEXT
    assert found.surprisals == pytest.approx(
        [-math.log2(probs[t, i]) for t, i in enumerate(ids[1:])], rel=1e-5
    )
    best = np.argsort(-probs)[:, :4]
    assert found.texts[-1] == [[llm.tokenizer.decode([i]) for i in row] for row in best.tolist()]
    np.testing.assert_allclose(found.probs[-1], np.take_along_axis(probs, best, 1), rtol=1e-5)
    assert found.probs.shape == (llm.config.n_layer, len(ids), 4)


def test_each_stream_is_read_by_its_name(llm):
    both = lens(llm, TEXT, ["resid_mid", "resid_post"])
    one = lens(llm, TEXT, "blocks.2.hook_resid_mid")
    i = both.names.index("blocks.2.hook_resid_mid")
    assert one.names == [both.names[i]]
    assert one.texts == [both.texts[i]]
    assert not np.array_equal(both.probs[i], both.probs[i + 1])


def test_a_notebook_shows_a_lens_with_candidates_as_titles(llm):
    found = lens(llm, TEXT)
    table = ElementTree.fromstring(found._repr_html_().replace("&#x27;", "'"))
    head, *rows = table.iter("tr")
    assert [each.text for each in head][2:] == found.names
    for t, row in enumerate(rows):
        token, bits, *cells = row
        assert token.text == repr(found.tokens[t])
        assert (bits.text or "") == (f"{found.surprisals[t - 1]:.2f}" if t else "")
        assert [cell.text for cell in cells] == [repr(texts[t][0]) for texts in found.texts]
        for i, cell in enumerate(cells):
            lines = zip(found.probs[i, t], found.texts[i][t], strict=True)
            # A parser of XML reads the newline of an attribute as a space.
            told = cell.get("title").replace("\n", " ").split()
            assert told == " ".join(f"{prob:.2%} {text!r}" for prob, text in lines).split()
            assert f", {0.8 * found.probs[i, t, 0]:.2f})" in cell.get("style")


@pytest.mark.parametrize("layer", [99, -99, 0.5, "1"])
def test_a_layer_that_is_not_there(llm, layer):
    with pytest.raises(
        RequestError, match=f"must be from -{llm.config.n_layer} to {llm.config.n_layer - 1}"
    ) as caught:
        attention(llm, TEXT, layer)
    assert (caught.value.field, caught.value.value) == ("layer", layer)


def test_a_notebook_shows_heads_as_cells_in_shades(llm):
    found = attention(llm, TEXT, -1)
    assert np.array_equal(found.pattern, attention(llm, TEXT, llm.config.n_layer - 1).pattern)
    np.testing.assert_allclose(found.pattern, llm.attentions(llm.tokenizer.encode(TEXT))[-1], atol=1e-6)
    heads = re.findall(r"<svg.*?</svg>", found._repr_html_(), re.DOTALL)
    assert len(heads) == llm.config.n_head
    for head, pattern in zip(heads, found.pattern, strict=True):
        shown = np.zeros_like(pattern)
        for cells, opacity in re.findall(r'<path d="([^"]+)" fill="#4682dc" fill-opacity="([^"]+)"/>', head):
            for k, q in re.findall(r"M(\d+) (\d+)h1v1h-1", cells):
                shown[int(q), int(k)] = float(opacity)
        assert np.abs(shown - pattern).max() <= 1 / SHADES
        titles = [
            unescape(title).splitlines() for title in re.findall("<title>(.*?)</title>", head, re.DOTALL)
        ]
        assert [title[0] for title in titles] == [repr(token) for token in found.tokens]
        for q, (_, first, *_) in enumerate(titles):
            assert first == f"{pattern[q].max():7.2%} {found.tokens[pattern[q].argmax()]!r}"
