"""What newcomers type: no traceback, the right sentence, and advice that works when it is followed to the letter."""

import io
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from support.bench_records import LIMITS
from support.commands import Outcome
from support.golden_adapters import write_lora, write_soft_prompt
from tinygpt.bench import sweep

pytestmark = pytest.mark.usefixtures("llm")  # its kernels are compiled: stderr is free of the notice of a first run
SCRIPT = Path(__file__).with_name("newcomers_mistakes.txt")


@dataclass(frozen=True)
class Mistake:
    command: str
    code: int
    says: list[str]
    followed: list[str]


def read_script() -> list[Mistake]:
    mistakes = []
    for block in re.split(r"\n\n+", SCRIPT.read_text(encoding="utf-8")):
        if block.startswith("$ "):
            command, answer, *followed = block.strip().split("\n")
            code, _, says = answer.partition(" ")
            assert all(line.startswith("> ") for line in followed)
            mistakes.append(Mistake(command[2:], int(code), says.split(" | "), [line[2:] for line in followed]))
    return mistakes


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, **{"transformer.wte.weight": np.zeros((2, 3), np.float32)})
    return file.getvalue()


ADAPTERS = {  # of the small demo, each by what writes it into a folder
    "tales_lora": lambda folder: write_lora(folder, 1, ["c_attn"], has_head=False),
    "tales_prompt": lambda folder: write_soft_prompt(folder, "prompt", 3),
}
FILES = {
    "story.txt": b"Once upon a time there was a king who had a daughter.\n",
    "507_tokens.txt": b"a" + b" a" * 506,
    "long.txt": b"a" + b" a" * 600,
    "latin1.txt": b"caf\xe9",
    "utf16.txt": "Once upon a time".encode("utf-16"),
    "prompts.jsonl": b'{"prompt": "Once", "max_tokens": 1}\n{"prompt": "Then", "max_tokens": 1}\n',
    "with_a_mark.jsonl": b'\xef\xbb\xbf{"prompt": "Once", "max_tokens": 1}\n',
    "utf16.jsonl": '{"prompt": "Once"}\n'.encode("utf-16"),
    "empty.txt": b"",
    "empty.jsonl": b"",
    "ids.jsonl": b'{"prompt": [464, 257], "max_tokens": 1}\n',
    "rows.jsonl": b'{"text": "Once upon a time"}\n',
    "comma.jsonl": b'{"prompt": "Once"}\n{"prompt": "a",}\n',
    "field.jsonl": b'{"prompt": "Once", "topk": 5}\n',
    "other_field.jsonl": b'{"prompt": "Once", "max_new_tokens": 5}\n{"text": "Once"}\n',
    "chat.jsonl": b'{"messages": [], "prompt": "Once", "stream": true}\n',
    "value.jsonl": b'{"prompt": "Once", "seed": -5}\n',
    "long.jsonl": b'{"prompt": "%s", "max_tokens": 5}\n' % (b"a" + b" a" * 600),
    "soft.jsonl": b'{"prompt": "Once", "soft_prompt": "tales"}\n',
    "twice.jsonl": b'{"id": "a", "prompt": "Once"}\n{"id": "a", "prompt": "Then"}\n',
    "schema.json": b'{"type": "object"}',
    "arrays.npz": npz(),
    "full/notes": b"",
    "checkpoint/config.json": b"{}",
    **{f"many/{i}": b"" for i in range(40)},
}


NAMES = {*FILES, "new", "many/new"}  # which a user has, or makes up


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sweep, "measure_limits", lambda dtype, threads, device: LIMITS
    )  # not the machine's: it takes a while
    return tmp_path


def write_files(folder: Path, mistake: Mistake) -> None:
    """Those that are spoken of."""
    lines = "\n".join([mistake.command, *mistake.followed])
    for name, data in FILES.items():
        if name.partition("/")[0] in lines:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
    for name, write in ADAPTERS.items():
        if name in lines:
            write(folder / name)


@pytest.fixture
def type_(capsys, give_stdin):
    """Run a command line, which may end in `< FILE` or in `> FILE`, and have "$(cat FILE)" in it."""

    def run(line: str) -> Outcome:
        program, *words = shlex.split(line)
        assert program == "tinygpt"
        words = [re.sub(r"^\$\(cat (.*)\)$", lambda found: FILES[found[1]].decode(), word) for word in words]
        if ">" in words:
            words = words[:-2]
        source = None
        if "<" in words:
            words, (_, source) = words[:-2], words[-2:]
        give_stdin(b"" if source is None else FILES[source])
        return Outcome(capsys, words)

    return run


def test_there_are_a_hundred():
    mistakes = read_script()
    assert len(mistakes) >= 100
    assert len({mistake.command for mistake in mistakes}) == len(mistakes)
    assert len(mistakes) == len(re.findall(r"^\$", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("mistake", read_script(), ids=lambda mistake: mistake.command)
def test_a_newcomers_mistake(type_, folder, mistake):
    write_files(folder, mistake)
    outcome = type_(mistake.command)
    answer = " ".join(f"{outcome.out}\n{outcome.err}".split())
    assert outcome.code == mistake.code, answer
    assert "Traceback" not in answer
    for words in mistake.says:
        assert words in answer
    for line in mistake.followed:
        unsaid = [word for word in shlex.split(line) if word not in mistake.command and word not in NAMES]
        assert [word for word in unsaid if word not in answer] == []
        followed = type_(line)
        assert followed.code == 0, followed.err
