"""`tinygpt generate --interactive`: lines in turns, on a pipe and on a terminal."""

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from support.golden_models import write_small_demo
from support.paths import ROOT
from tinygpt import LLM, SamplingParams
from tinygpt.cli import generate
from tinygpt.cli import main as cli

BASE = {"max_tokens": 8, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "ignore_eos": True}
FLAGS = ["--interactive", "--max-tokens", "8", "--seed", "7", "--ignore-eos"]
POSIX = pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudo-terminals")


@pytest.fixture
def talk(monkeypatch, capsys, llm):
    """Runs the command in this process, with these lines on stdin and `llm` for its model."""

    def run(*lines, flags=(), prompt=(), model=llm):
        data = b"".join(line if isinstance(line, bytes) else f"{line}\n".encode() for line in lines)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        monkeypatch.setattr(generate, "load_llm", lambda args: (model, 0.25))
        code = cli.main(["generate", *prompt, *FLAGS, *flags])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def written(llm, *lines: str, **fields) -> list[str]:
    """What follows each line, from the library."""
    session, texts = llm.session(), []
    for i, line in enumerate(lines):
        session.extend("\n" + line if i and line else line)
        texts.append(session.generate(SamplingParams(**{**BASE, **fields}, seed=7 + i)).outputs[0].text)
    return texts


def test_each_line_goes_on_with_one_text(talk, llm):
    code, out, err = talk("Once upon a time", "", "And then")
    assert (code, out) == (0, "".join(f"{text}\n" for text in written(llm, "Once upon a time", "", "And then")))
    begin, *turns = err.splitlines()
    assert begin == "tinygpt: type a text, and :help for more; load 0.25 s; seed 7"
    assert len(turns) == 3
    assert all(re.fullmatch(r"tinygpt: prompt \d+ tokens?, .*/s; generation 7 tokens, .*/s", turn) for turn in turns)


def test_a_model_without_bos(talk, tmp_path):
    """It can begin with any line but an empty one, which is told and asked for again."""
    config = write_small_demo(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"bos_token_id": None}))
    with LLM(str(tmp_path)) as model:
        code, out, err = talk("", "Once upon a time", "And then", model=model)
        assert (code, out) == (0, "".join(f"{text}\n" for text in written(model, "Once upon a time", "And then")))
    assert "tinygpt: the prompt is empty and this model has no BOS token to start from: give it some text." in err


def test_a_prompt_is_the_first_line(talk):
    assert talk("And then", prompt=["Once", "upon"])[1] == talk("Once upon", "And then")[1]


@pytest.mark.parametrize("end", ["\r\n", "\n"], ids=["crlf", "lf"])
def test_the_ends_of_lines_and_of_the_input(talk, llm, end):
    (expected,) = written(llm, " été ")
    assert talk(f" été {end}".encode())[1] == talk(" été ".encode())[1] == expected + "\n"
    assert talk("Once", ":quit", "never read")[1] == talk("Once")[1]
    assert talk()[1] == ""


def test_rewind_takes_a_turn_back_and_tries_again_otherwise(talk, llm):
    _, out, err = talk("Once", "And then", ":rewind", "And then", ":rewind", ":rewind", ":rewind")
    session = llm.session()
    session.extend("Once")
    expected = [session.generate(SamplingParams(**BASE, seed=7)).outputs[0].text]
    for seed in (8, 9):
        again = session.fork()
        again.extend("\nAnd then")
        expected.append(again.generate(SamplingParams(**BASE, seed=seed)).outputs[0].text)
    assert out == "".join(f"{text}\n" for text in expected)
    assert expected[1] != expected[2]
    ending = ("Once" + expected[0])[-40:]
    assert [line for line in err.splitlines()[1:] if "; generation " not in line] == [
        f"tinygpt: the text ends with {ending!r}",
        f"tinygpt: the text ends with {ending!r}",
        "tinygpt: the text is empty",
        "tinygpt: there is no line to take back.",
    ]


def test_reset_begins_a_new_text(talk, llm):
    _, out, _ = talk("Once upon a time", ":reset", "It was", flags=["--temperature", "0"])
    first, second = (written(llm, line, temperature=0.0)[0] for line in ("Once upon a time", "It was"))
    assert out == f"{first}\n{second}\n"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (":help", "Ctrl-C ends the sample"),
        (":nonsense", "unknown command :nonsense; :help lists them"),
        (":rest", "unknown command :rest; did you mean :reset?"),
        (":rewind 3", "unknown command :rewind 3"),
    ],
)
def test_a_command_that_goes_wrong_ends_nothing(talk, line, says):
    code, out, err = talk(line, "Once")
    assert code == 0
    assert says in err
    assert out == talk("Once")[1]


def test_what_is_refused_leaves_the_text_as_it_was(talk, llm):
    """A surrogate that UTF-8 cannot spell cannot come from a pipe; a line that is too long can."""
    code, out, err = talk("Once", "word " * 600, "And then")
    assert (code, out) == (0, "".join(f"{text}\n" for text in written(llm, "Once", "And then")))
    assert re.search(r"prompt has \d+ tokens .* The text is unchanged: use :rewind or :reset", err)


def test_a_text_that_slides_says_what_is_no_longer_seen(talk):
    with LLM("demo", max_model_len=24) as small:
        code, out, err = talk(*["a b c d e"] * 6, flags=["--overflow", "slide", "--stride", "10"], model=small)
    assert (code, len(out.splitlines()) >= 6) == (0, True)
    left = [int(count) for count in re.findall(r"the first (\d+) tokens of the text exceed", err)]
    assert left == sorted(set(left)) != []


def test_a_line_that_is_no_text(talk):
    code, out, err = talk("Once", b"caf\xe9\n")
    assert code == 2
    assert "line 2 of stdin is not UTF-8 text" in err
    assert out == talk("Once")[1]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--n", "2"], "n is 2 and a session goes on with one sample"),
        (["--best-of", "2"], "is 2 and a stream cannot choose"),
        (["--echo"], "--echo is not possible with --interactive"),
        (["--input", "x"], "--input is not possible with --interactive"),
        (["--max-tokens", "600"], "together 601"),
    ],
    ids=str,
)
def test_what_no_turn_could_do_is_refused_at_once(talk, flags, says):
    code, out, err = talk("Once", flags=flags)
    assert (code, out) == (2, "")
    assert says in err


def test_ctrl_c_ends_the_sample_and_keeps_its_tokens(talk, llm, monkeypatch):
    """Here at the third chunk: its token is in the session, and its text was not printed."""
    num_printed, emit = 0, generate.emit

    def interrupted(text="", **options):
        nonlocal num_printed
        num_printed += 1
        if num_printed == 3:
            raise KeyboardInterrupt
        emit(text, **options)

    monkeypatch.setattr(generate, "emit", interrupted)
    code, out, _ = talk("Once", "And then")
    session = llm.session()
    session.extend("Once")
    session.generate(SamplingParams(**{**BASE, "max_tokens": 3}, seed=7))
    session.extend("\nAnd then")
    assert code == 0
    assert out.splitlines()[1] == session.generate(SamplingParams(**BASE, seed=8)).outputs[0].text.rstrip("\n")


def heed_interrupts() -> None:
    """As on a terminal. What a shell runs in the background ignores them, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@POSIX
@pytest.mark.parametrize(("command", "end"), [(["generate", "--interactive"], ":quit"), (["chat"], "/quit")])
def test_ctrl_c_on_a_terminal(command, end):
    """In a line it gives up the line, in a sample it ends the sample; neither ends the program."""
    import pty

    screen, child = pty.openpty()
    flags = ["--seed", "7", "--ignore-eos", "--max-tokens", "100000", "--overflow", "slide"]
    command = [sys.executable, "-m", "tinygpt", *command, *flags]
    environment = {**os.environ, "TERM": "dumb", "INPUTRC": os.devnull}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), child)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, start_new_session=True, preexec_fn=heed_interrupts, **streams
    )
    os.close(child)
    shown = ""

    def read_until(text: str) -> None:
        nonlocal shown
        deadline = time.monotonic() + 60
        while text not in shown:
            assert time.monotonic() < deadline, shown
            if select.select([screen], [], [], 1)[0]:
                shown += os.read(screen, 4096).decode(errors="replace")
        shown = shown.partition(text)[2]

    try:
        read_until("> ")
        for typed, seen in (("Given up", "Given up"), ("Once\n", "Once\r\n")):
            os.write(screen, typed.encode())
            read_until(seen)
            if typed == "Once\n":
                read_until(" ")
            time.sleep(0.2)  # what comes while a key is handled waits for the next key
            os.kill(process.pid, signal.SIGINT)
            read_until("> ")
        os.write(screen, f"{end}\n".encode())
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(screen)
