"""`tinygpt lens`: the library's logit lens as a table, as JSON and as HTML."""

import json
import re

from tinygpt.cli.main import main
from tinygpt.look.html import lens as lens_of

TEXT = "Once upon <b>a time"


def test_a_table_has_rows_for_a_token_and_a_column_for_each_stream(call, llm):
    title, head, *rows = call(
        "lens", TEXT, "--top", "2", "--names", "resid_post,blocks.0.hook_resid_mid"
    ).out.splitlines()
    found = lens_of(llm, TEXT, ["resid_post", "blocks.0.hook_resid_mid"], 2)
    assert title.startswith("demo: ")
    assert head.split() == [
        "token",
        "bits",
        "0.resid_mid",
        *(f"{i}.resid_post" for i in range(llm.config.n_layer)),
    ]
    assert len(rows) == 2 * len(found.tokens)
    for t, token in enumerate(found.tokens):
        bits = [f"{found.surprisals[t - 1]:.2f}"] if t else []
        assert rows[2 * t].startswith("  ".join(["", repr(token)]))
        assert rows[2 * t].removeprefix(f"  {token!r}").split()[: len(bits)] == bits
        assert re.match(r" +\d+% ", rows[2 * t + 1])  # without the token
        for k in range(2):
            cells = [
                f"{row[t][k]:.0%} {texts[t][k]!r}"
                for row, texts in zip(found.probs, found.texts, strict=True)
            ]
            assert [*re.findall(r"\d+% (?:'[^']*'|\"[^\"]*\")", rows[2 * t + k])] == cells


def test_names_alone_are_printed_without_a_text(call, llm):
    names = call("lens", "--names").out.splitlines()
    assert names[0] == "hook_embed"
    assert lens_of(llm, TEXT, names).names == names  # each has a lens
    assert not {"blocks.0.attn.hook_z", "blocks.0.mlp.hook_post"} & {*names}
    assert json.loads(call("lens", TEXT, "--names", "--json").out) == {"model": "demo", "names": names}


def test_names_alone_have_no_page(tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["lens", "--names", "--html", str(page)]) == 2
    assert "--html is a page of a text: give --names NAMES, or leave it out." in capsys.readouterr().err
    assert not page.exists()


def test_json(call, llm):
    found = lens_of(llm, TEXT, top=1)
    record = json.loads(call("lens", TEXT, "--json", "--top", "1").out)
    assert (record["model"], record["text"], record["tokens"]) == ("demo", TEXT, found.tokens)
    assert record["surprisals"] == found.surprisals
    assert record["names"] == [f"blocks.{i}.hook_resid_post" for i in range(llm.config.n_layer)]
    assert (record["candidates"], record["probabilities"]) == (found.texts, found.probs.tolist())


def test_html_of_stdin(call, llm, tmp_path, give_stdin):
    give_stdin(TEXT.encode())
    file = tmp_path / "lens.html"
    assert call("lens", "--html", str(file)).out == ""
    assert file.read_text().endswith(f"{lens_of(llm, TEXT)._repr_html_()}\n")
