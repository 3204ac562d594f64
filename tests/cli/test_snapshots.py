"""Command lines with their exit code and all that they print, as `tests/data/cli.txt` has them.

After a deliberate change, `python tests/record.py` records the answers again.
"""

import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from support import foreign, tiny_checkpoint
from support.gguf_writer import gguf_bytes
from support.golden_models import write_small_demo
from support.paths import HOW_TO_RECORD, ROOT, VOCAB_SIZE
from tinygpt import LLM
from tinygpt.cli import main as cli
from tinygpt.weights import open as checkpoints

RECORD = ROOT / "tests" / "data" / "cli.txt"
VARYING = {  # what differs between runs, folders and releases of Python, and its stand-in
    r"\d+\.\d+(?= tokens/s| s\b)": "#",
    r"; compiling \d+ kernels? # s": "",
    r"tinygpt: .*compil.*\n": "",
    r" \(choose from .*\)": "",
    r"\b[0-9a-f]{64}\b": "HASH",
    r"\S+(?=/huggingface/hub)": "~/.cache",
}


@dataclass(frozen=True)
class Session:
    """A command line. answer: lines that begin with "| " (stdout) and "! " (stderr), and the exit code."""

    command: str
    answer: str


def read_record() -> tuple[dict[str, bytes], list[Session]]:
    """Return the files and the sessions of RECORD. `+ FILE LINE` adds a line, with Python's escapes."""
    _, *parts = RECORD.read_text(encoding="utf-8").split("\n\n")
    files: dict[str, bytes] = {}
    sessions = []
    for part in parts:
        if part.startswith("+ "):
            for line in part.splitlines():
                _, name, text = line.split(" ", 2)
                data = text.encode().decode("unicode_escape").encode("latin-1")
                files[name] = files.get(name, b"") + data + b"\n"
        else:
            command, _, answer = part.strip().partition("\n")
            sessions.append(Session(command.removeprefix("$ "), answer))
    return files, sessions


@contextlib.contextmanager
def prepared(files: dict[str, bytes]) -> Iterator[None]:
    """Fill the working folder with the files, tiny checkpoints and their conversions."""
    for name, data in files.items():
        Path(name).write_bytes(data)
    Path("nothing").mkdir()
    write_checkpoints()
    with pytest.MonkeyPatch.context() as patch:
        Path("demo-folder").mkdir()
        patch.setattr(checkpoints, "DEMO", write_small_demo(Path("demo-folder").resolve()))
        patch.setenv("COLUMNS", "100")
        answer_of("convert tiny int8 --threads 1")
        yield


def write_checkpoints() -> None:
    tensors = tiny_checkpoint.random_tensors()
    head = tensors["transformer.wte.weight"] + 1
    mask = np.ones((1, 1, 6, 6), np.int16)
    more = {"lm_head.weight": head, "transformer.h.0.attn.bias": mask}
    tiny_checkpoint.write_checkpoint(Path("tiny"))
    tiny_checkpoint.write_checkpoint(Path("own-head"), tensors | more)
    del tensors["transformer.ln_f.bias"]
    tiny_checkpoint.write_checkpoint(Path("unlike"), tensors, n_positions=5)
    added = {f"<extra {i}>": VOCAB_SIZE + i for i in range(7)}
    tiny_checkpoint.write_with_demo_tokenizer(Path("added"), added)
    for form in ("nanogpt", "gguf", "openai_tf", "megatron"):
        foreign.WRITERS[form](Path(form), tiny_checkpoint.random_tensors(prefix=""))
    blocks = {"a": ((64,), 2, bytes(36)), "b": ((256,), 14, bytes(210))}
    Path("blocks.gguf").write_bytes(gguf_bytes(foreign.GGUF_KEYS, blocks))


def answer_of(command: str) -> str:
    """Run a command line here. A word "<FILE" is its stdin, else it is empty."""
    words = shlex.split(command)
    given = [word[1:] for word in words if word.startswith("<")]
    streams = {"stdin": io.TextIOWrapper(io.BytesIO(Path(given[0]).read_bytes() if given else b""))}
    streams |= {
        name: io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for name in ("stdout", "stderr")
    }
    loaded = []
    with pytest.MonkeyPatch.context() as during:
        for name, stream in streams.items():
            during.setattr(sys, name, stream)
        during.setattr(LLM, "__init__", noting(LLM.__init__, loaded))
        try:
            code = cli.main([word for word in words if not word.startswith("<")])
        except SystemExit as ended:
            code = ended.code
    lines = []
    for mark, stream in (("|", streams["stdout"]), ("!", streams["stderr"])):
        text = stream.buffer.getvalue().decode().replace(os.getcwd(), "/here")
        for pattern, shown in VARYING.items():
            text = re.sub(pattern, shown, text)
        lines += [f"{mark} {line}".rstrip() for line in text.splitlines()]
    return "\n".join([*lines, f"exit {code}" + ", a model was loaded" * bool(loaded)])


def noting(init: Callable, loaded: list) -> Callable:
    def noted(self, *arguments, **named):
        init(self, *arguments, **named)
        loaded.append(self)

    return noted


FILES, SESSIONS = read_record()
pytestmark = pytest.mark.skipif(os.name == "nt", reason="says what a POSIX system says of files")


@pytest.fixture(scope="module", autouse=True)
def _folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("cli"))
        with prepared(FILES):
            yield


def contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.command[:60])
def test_an_answer_is_the_one_on_record(session):
    """A command that is refused changes no file."""
    before = contents()
    answer = answer_of(session.command)
    assert answer == session.answer, HOW_TO_RECORD
    assert "exit 2" not in answer or contents() == before


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with prepared(FILES):
            answers = {session.command: answer_of(session.command) for session in SESSIONS}
    shown = RECORD.read_text(encoding="utf-8").split("\n\n")
    parts = [part for part in shown if not part.startswith("$ ")]
    parts += [f"$ {command}\n{answer}" for command, answer in answers.items()]
    RECORD.write_text("\n\n".join(parts).rstrip() + "\n", encoding="utf-8")
