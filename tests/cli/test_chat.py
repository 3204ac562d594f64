"""`tinygpt chat`: lines of a pipe, commands, and what is said of them. Terminals: test_interactive.py."""

import io
import json
import sys

import pytest

from tinygpt import LLM
from tinygpt.cli import chat
from tinygpt.cli import main as cli

FLAGS = ["--max-tokens", "8", "--seed", "7", "--ignore-eos"]


@pytest.fixture
def talk(monkeypatch, capsys, llm):
    """Runs the command in this process, with these lines on stdin and `llm` for its model."""

    def run(*lines, flags=(), model=llm):
        data = "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        monkeypatch.setattr(chat, "load_llm", lambda args, chat_template: (model, 0.25))
        code = cli.main(["chat", *FLAGS, *flags])
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
        text += "\n" + found[-1]
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


def test_the_models_template_is_in_use(talk, small_demo, tmp_path, llm):
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}:")
    with LLM(small_demo, chat_template=file) as model:
        _, out, err = talk("Hello", flags=["--system", "Be brief."], model=model)
    assert out == said(*answers(llm, "system Be brief.user Hello:"))
    assert "no chat template" not in err


def test_reset_keeps_the_systems_message(talk, llm):
    _, out, _ = talk("Once", "/reset", "The dog", flags=["--system", "Be brief."])
    first, second = (answers(llm, text, first="Be brief.", seed=7 + i) for i, text in enumerate(("Once", "The dog")))
    assert out == said(*first, *second)


def test_a_conversation_is_saved(talk, llm, tmp_path):
    _, _, err = talk("Once", f"/save {tmp_path}/a b.json", "/save", f"/save {tmp_path}")
    [answer] = answers(llm, "Once")
    messages = [{"role": "user", "content": "Once"}, {"role": "assistant", "content": answer}]
    assert json.loads((tmp_path / "a b.json").read_text()) == {"messages": messages}
    assert err.splitlines()[-3:] == [
        f"tinygpt: {tmp_path}/a b.json has 2 messages",
        "tinygpt: /save needs the name of a file",
        f"tinygpt: {tmp_path} cannot be written: Is a directory",
    ]


def test_other_commands(talk, llm):
    _, out, err = talk("/help", "/rest", "/quit", "never read")
    assert out == ""
    assert "/save FILE" in err
    assert err.splitlines()[-1] == "tinygpt: unknown command /rest; did you mean /reset?"


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
    assert second == answers(llm, "And then", first=f"Once upon a time\n{first}", seed=8)[0].rstrip("\n")


def test_a_long_conversation_loses_its_beginning(talk, small_demo):
    with LLM(small_demo, max_model_len=24) as small:
        code, out, err = talk(*["a b c d e"] * 4, model=small)
        assert (code, len(out.splitlines()) >= 4) == (0, True)
        assert "tokens of the conversation exceed the model's positions and are truncated" in err
        _, out, err = talk("a b c d e " * 9, flags=["--overflow", "refuse"], model=small)
    assert out == ""
    assert "shorten the prompt" in err
    assert "The conversation is unchanged; /reset begins a new one." in err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--n", "2"], "--n is 2 and must be 1: a chat has one answer"),
        (["--max-tokens", "600"], "max_tokens is 600"),
        (["--best-of", "2"], "--best-of is 2 and a stream cannot choose"),
    ],
)
def test_what_no_message_could_do_is_refused_at_once(talk, flags, says):
    code, out, err = talk("Once", flags=flags)
    assert (code, out) == (2, "")
    assert says in err
