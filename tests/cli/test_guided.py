"""Guided texts on the command line: flags, and the fields of a line of --input."""

import json

import pytest

from tinygpt.cli.main import main

pytest.importorskip("llguidance", reason="llguidance, the extra `guided`, is not installed")

BOOLEAN = {"type": "boolean"}


def run_lines(tmp_path, capsys, *lines):
    source = tmp_path / "prompts.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    code = main(["generate", "--input", str(source), "--seed", "3"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("flags", "allowed"),
    [
        (["--guided-choice", "yes", "--guided-choice", "no"], ("yes", "no")),
        (["--guided-regex", "ab{3}"], ("abbb",)),
        (["--guided-json", json.dumps(BOOLEAN)], ("true", "false")),
        (["--guided-grammar", 'start: "(" /x/ ")"'], ("(x)",)),
    ],
)
def test_a_flag_guides_the_text(capsys, flags, allowed):
    assert main(["generate", "Once upon a time", *flags]) == 0
    assert capsys.readouterr().out.removesuffix("\n") in allowed


def test_each_line_has_its_own_guidance(tmp_path, capsys):
    code, out, _ = run_lines(
        tmp_path,
        capsys,
        {"prompt": "Once", "guided_json": BOOLEAN},
        {"prompt": "Once", "guided_choice": ["yes"]},
        {"prompt": "Once", "max_tokens": 3},
    )
    assert code == 0
    samples = {record["id"]: record["outputs"][0] for record in map(json.loads, out.splitlines())}
    assert samples[1]["text"] in ("true", "false")
    assert (samples[2]["text"], samples[2]["stop_reason"]) == ("yes", "grammar")
    assert samples[3]["finish_reason"] == "length"


CUT = "cut short by --max-tokens, and not yet what --guided-regex asks for: raise the limit\n"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("-n 3 --guided-regex [a-c]{9}[d-f]{9}", f"tinygpt: the text was {CUT}"),
        ("-n 3 --guided-regex [a-c]{9}[d-f]{9} --json", f"tinygpt: the text was {CUT}"),
        ("-n 3 --guided-regex [a-c]{9}[d-f]{9} --n 2", f"tinygpt: 2 of 2 samples were {CUT}"),
        ("-n 3 --guided-regex [a-c]{9}[d-f]{9} --interactive", f"tinygpt: the text was {CUT}"),
        ("-n 9 --guided-regex [a-c]{9}", None),
        ("-n 3 --guided-regex [a-c]*", None),
        ("-n 3", None),
    ],
)
def test_a_text_that_a_limit_cut_short_is_said_not_to_be_what_was_asked_for(capsys, give_stdin, flags, said):
    give_stdin(b"")  # of --interactive
    assert main(["generate", "Once upon a time", "--seed", "3", *flags.split()]) == 0
    err = capsys.readouterr().err
    assert said in err if said else "cut short" not in err


def test_lines_that_a_limit_cut_short_are_counted(tmp_path, capsys):
    whole = {"prompt": "Once", "guided_choice": ["yes"]}
    cut = {"prompt": "Once", "guided_json": {"type": "string", "minLength": 40}, "max_tokens": 4}
    code, out, err = run_lines(tmp_path, capsys, whole, cut, cut, {**cut, "max_tokens": 3, "guided_json": None})
    assert code == 0
    assert [json.loads(line)["outputs"][0]["finish_reason"] for line in sorted(out.splitlines())].count("length") == 3
    assert '2 guided texts cut short, and not yet what the grammar asks for: "finish_reason": "length" in their' in err


def test_lines_without_a_possible_grammar_are_listed_before_a_model_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tinygpt.cli.loading.load_llm", None)
    lines = [
        {"prompt": "a"},
        {"prompt": "a", "guided_regex": "("},
        {"prompt": "a", "top_k": -2},
        {"prompt": "a", "guided_json": {"type": 3}},
    ]
    code, out, err = run_lines(tmp_path, capsys, *lines)
    assert (code, out) == (2, "")
    headline, *listed = err.splitlines()
    assert "3 lines of" in headline
    assert listed[0] == '  line 2: "guided_regex": "(" is not possible: unclosed group.'
    assert listed[1].startswith('  line 3: "top_k": -2 is not possible')
    assert listed[2].startswith('  line 4: "guided_json": ')


def test_lines_of_one_grammar_have_it_checked_once(tmp_path, capsys, monkeypatch):
    checked = []
    monkeypatch.setattr("tinygpt.cli.input.prompts_file.check_grammar", lambda *guidance: checked.append(guidance))
    line = {"prompt": "Once", "max_tokens": 1, "guided_choice": ["yes"]}
    code, _, _ = run_lines(tmp_path, capsys, line, line, {"prompt": "Once", "max_tokens": 1})
    assert (code, checked) == (0, [("guided_choice", ("yes",))])
