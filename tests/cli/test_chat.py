"""`tinygpt chat`: lines of a pipe and of a terminal, commands, and what is said of them."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from support.paths import ROOT
from support.processes import heed_interrupts, readable
from tinygpt import LLM
from tinygpt.cli import chat
from tinygpt.cli import main as cli

FLAGS = ["--max-tokens", "8", "--seed", "7", "--ignore-eos"]


@pytest.fixture
def talk(monkeypatch, capsys, llm, give_stdin):
    """Runs the command in this process, with these lines on stdin and `llm` for its model."""

    def run(*lines, flags=(), model=llm, command=("chat",)):
        give_stdin(b"".join(line if isinstance(line, bytes) else f"{line}\n".encode() for line in lines))
        monkeypatch.setattr(chat, "load_llm", lambda args, chat_template: (model, 0.25))
        code = cli.main([*command, *FLAGS, *flags])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def answers(llm, *messages: str, first: str = "", seed: int = 7) -> list[str]:
    """What follows each message, from the library."""
    text, found = first, []
    params = {"max_tokens": 8, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "ignore_eos": True}
    for i, message in enumerate(messages):
        text = f"{text}\n{message}" if text else message
        [output] = llm.generate(text, **params, seed=seed + i)
        found.append(output.outputs[0].text)
        text += found[-1]
    return found


def said(*texts: str) -> str:
    return "".join(f"{text}\n" for text in texts)


def test_each_message_follows_the_conversation(talk, llm):
    code, out, err = talk("Once upon a time", "", "And then")
    assert (code, out) == (0, said(*answers(llm, "Once upon a time", "And then")))
    assert err.splitlines() == [
        "tinygpt: demo has no chat template, so it continues your text (--chat-template plain)",
        "tinygpt: type a message, and /help for more; seed 7",
    ]


def test_generate_interactive_is_chat(talk, llm):
    _, out, _ = talk("Once upon", "a time", command=("generate", "--interactive"))
    assert out == said(*answers(llm, "Once upon", "a time"))


def test_the_models_template_is_in_use(talk, small_demo, tmp_path, llm):
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}:")
    with LLM(small_demo, chat_template=file) as model:
        _, out, err = talk("Hello", flags=["--system", "Be brief."], model=model)
    assert out == said(*answers(llm, "system Be brief.user Hello:"))
    assert "no chat template" not in err


def test_reset_keeps_the_systems_message(talk, llm):
    _, out, _ = talk("Once", "/reset", "/rewind", "The dog", flags=["--system", "Be brief."])
    first, second = (
        answers(llm, text, first="Be brief.", seed=7 + i) for i, text in enumerate(("Once", "The dog"))
    )
    assert out == said(*first, *second)


def test_rewind_takes_a_message_and_its_answer_back(talk, llm):
    _, out, err = talk("Once", "And then", "/rewind", "The dog", "/rewind", "/rewind", "/rewind", "The cat")
    first, second = answers(llm, "Once", "And then")
    [third] = answers(llm, "The dog", first=f"Once{first}", seed=9)
    [last] = answers(llm, "The cat", seed=10)
    assert out == said(first, second, third, last)
    counts = [line.rpartition(" has ")[2] for line in err.splitlines() if "the conversation has" in line]
    assert counts == ["2 messages", "2 messages", "0 messages", "0 messages"]


@pytest.mark.parametrize("end", ["\r\n", "\n"], ids=["crlf", "lf"])
def test_the_ends_of_lines_and_of_the_input(talk, llm, end):
    assert (
        talk(f" \u00e9t\u00e9 {end}".encode())[1]
        == talk(" \u00e9t\u00e9 ".encode())[1]
        == said(*answers(llm, " \u00e9t\u00e9 "))
    )
    assert talk()[1] == ""


def test_a_line_that_is_no_text(talk):
    code, out, err = talk("Once", b"caf\xe9\n")
    assert code == 2
    assert "line 2 of stdin is not UTF-8 text" in err
    assert out == talk("Once")[1]


def test_a_conversation_is_saved(talk, llm, tmp_path):
    _, _, err = talk("Once", f"/save {tmp_path}/a b.json")
    [answer] = answers(llm, "Once")
    messages = [{"role": "user", "content": "Once"}, {"role": "assistant", "content": answer}]
    assert json.loads((tmp_path / "a b.json").read_text()) == {"messages": messages}
    assert err.endswith(f"tinygpt: {tmp_path}/a b.json has 2 messages\n")


def test_ctrl_c_ends_the_answer_and_keeps_its_text(talk, llm, monkeypatch):
    num_printed, emit = 0, chat.emit

    def interrupted(text="", **options):
        nonlocal num_printed
        num_printed += 1
        emit(text, **options)
        if num_printed == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat, "emit", interrupted)
    code, out, _ = talk("Once upon a time", "And then")
    [whole] = answers(llm, "Once upon a time")
    first, second = out.splitlines()
    assert code == 0
    assert first != whole
    assert whole.startswith(first)
    assert second == answers(llm, "And then", first=f"Once upon a time{first}", seed=8)[0].rstrip("\n")


def test_a_long_conversation_loses_its_beginning(talk, small_demo):
    with LLM(small_demo, max_model_len=24) as small:
        code, out, err = talk(*["a b c d e"] * 4, model=small)
        assert (code, len(out.splitlines()) >= 4) == (0, True)
        assert "tokens of the conversation exceed the model's positions and are truncated" in err
        _, out, err = talk("a b c d e " * 9, flags=["--overflow", "refuse"], model=small)
    assert out == ""
    assert "shorten the prompt" in err
    assert "The conversation is unchanged; /reset begins a new one." in err


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudo-terminals")
def test_ctrl_c_on_a_terminal():
    """In a line it gives up the line, in an answer it ends the answer; neither ends the program."""
    import pty

    screen, child = pty.openpty()
    flags = ["--seed", "7", "--ignore-eos", "--max-tokens", "100000", "--overflow", "slide"]
    command = [sys.executable, "-m", "tinygpt", "chat", *flags]
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
            if readable([screen], 1):
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
        os.write(screen, b"/quit\n")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(screen)
