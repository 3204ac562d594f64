"""--color: messages, tokens by their surprisal, and $NO_COLOR."""

import io
import json
import math
import re
import sys

import pytest

from tinygpt import SamplingParams
from tinygpt.cli import chat, streams
from tinygpt.cli import main as cli

PAINT = re.compile(r"\x1b\[38;2;(\d+);(\d+);(\d+)m(.*?)\x1b\[39m", re.DOTALL)
ESCAPE = re.compile(r"\x1b\[[\d;]*m")
ARGUMENTS = ["Once upon a time", "--seed", "7", "--max-tokens", "24"]
pytestmark = pytest.mark.usefixtures("llm")  # its kernels are compiled


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def surprisals(llm):
    params = SamplingParams(max_tokens=24, temperature=0.8, top_k=40, top_p=0.95, seed=7, logprobs=0)
    [output] = llm.generate("Once upon a time", params)[0].outputs
    found = zip(output.token_ids, output.logprobs, strict=True)
    return output.text, [(llm.tokenizer.decode([i]), -logprobs[i] / math.log(2)) for i, logprobs in found]


@pytest.mark.parametrize("how", [[], ["--no-stream"]], ids=["stream", "no-stream"])
def test_tokens_are_the_redder_the_more_surprising(run, llm, how):
    shown = run([*ARGUMENTS, "--color", "surprise", *how]).out
    text, tokens = surprisals(llm)
    assert ESCAPE.sub("", shown) == text + "\n"
    expected = [(name.strip(), bits) for name, bits in tokens if bits >= 1 and name.strip()]
    painted = PAINT.findall(shown)
    assert [found[3] for found in painted] == [name for name, _ in expected]
    assert 3 < len(painted) < len(tokens)
    by_surprisal = sorted(zip((bits for _, bits in expected), painted, strict=True))
    reds, greens = ([int(found[i]) for _, found in by_surprisal] for i in (0, 1))
    assert (reds, greens) == (sorted(reds), sorted(greens, reverse=True))
    assert len(set(greens)) > 2


def test_a_stop_string_cuts_the_colored_text(run, llm):
    text, _ = surprisals(llm)
    stop = text[len(text) // 2 :][:3]
    for how in ([], ["--no-stream"]):
        shown = run([*ARGUMENTS, "--color", "surprise", "--stop", stop, *how]).out
        assert ESCAPE.sub("", shown) == text[: text.index(stop)] + "\n"


def test_no_color_and_never_leave_the_text_plain(run, monkeypatch):
    plain = run([*ARGUMENTS, "--color", "never"])
    monkeypatch.setenv("NO_COLOR", "1")
    assert run([*ARGUMENTS, "--color", "surprise"]).out == plain.out
    assert "\x1b" not in plain.out + plain.err


def test_a_chat_is_colored_and_saved_plain(llm, monkeypatch, capsys, tmp_path, give_stdin):
    def talk(*flags):
        give_stdin(f"Once\n/save {tmp_path}/x\n".encode())
        assert cli.main(["chat", "--seed", "7", "--max-tokens", "24", *flags]) == 0
        saved = json.loads((tmp_path / "x").read_text())
        return capsys.readouterr().out, saved

    monkeypatch.setattr(chat, "load_llm", lambda args, chat_template: (llm, 0.25))
    plain, saved = talk()
    colored, same = talk("--color", "surprise")
    assert ESCAPE.sub("", colored) == plain
    assert len(PAINT.findall(colored)) > 2
    assert same == saved


# no-color.org: "when present and not an empty string"
PLACES = """
auto terminal: colored
surprise terminal: colored
auto file: plain
surprise file: plain
auto terminal NO_COLOR=1: plain
auto terminal NO_COLOR=: colored
auto terminal TERM=dumb: plain
always file NO_COLOR=1: colored
never terminal: plain
"""


@pytest.mark.parametrize("case", PLACES.strip().splitlines())
def test_messages_have_colors_on_a_terminal(monkeypatch, case):
    place, _, how = case.partition(": ")
    color, stream, *environment = place.split()
    is_colored = how == "colored"
    terminal = io.StringIO()
    terminal.isatty = lambda: stream == "terminal"
    monkeypatch.setattr(sys, "stderr", terminal)
    for variable in environment:
        monkeypatch.setenv(*variable.split("="))
    with streams.logging_to_stderr(color=color):
        streams.log("compiling")
        streams.print_error("no such file")
    note, error = terminal.getvalue().splitlines()
    assert [ESCAPE.sub("", line) for line in (note, error)] == [
        "tinygpt: compiling",
        "tinygpt: error: no such file",
    ]
    assert [line.startswith("\x1b[") and line.endswith("\x1b[0m") for line in (note, error)] == [
        is_colored
    ] * 2
    assert (note.partition("t")[0] == error.partition("t")[0]) != is_colored


def test_commands_color_errors_by_themselves(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    for command in (["info", "/absent"], ["generate", "Once", "-m", "/absent"]):
        assert cli.main(command) == 2
    assert terminal.getvalue().count("\x1b[31mtinygpt: error: ") == 2
