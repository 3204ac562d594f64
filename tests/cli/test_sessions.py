"""Command lines and calls as users of other programs type them: `tests/data/sessions.txt` says which are refused."""

import shlex
import subprocess
import sys

import pytest

from support.paths import ROOT
from tinygpt import LLM, SamplingParams
from tinygpt.cli import main as cli
from tinygpt.cli.serve import config_of
from tinygpt.errors import TinyGPTError

PROMPTS = ["Hello, my name is", "The future of AI is"]


def sessions():
    program = ""
    for line in (ROOT / "tests" / "data" / "sessions.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            program = line[1:-1]
        elif line and not line.startswith("#"):
            yield pytest.param(line.removeprefix("! "), line.startswith("! "), id=f"{program}: {line}")


@pytest.fixture(scope="module")
def places(small_demo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sessions")
    (folder / "text.txt").write_text("Once upon a time")
    (folder / "grammar.gbnf").write_text('root ::= "a" | "b"')
    (folder / "config.yaml").write_text(
        f'model: {small_demo}\nhost: "127.0.0.1"\nport: 6379\nuvicorn-log-level: "info"\ngpu-memory-utilization: 0.9\n'
    )
    convert = [sys.executable, "-m", "tinygpt", "convert", small_demo, str(folder / "gguf"), "--to", "gguf"]
    subprocess.run(convert, cwd=ROOT, check=True, capture_output=True)
    (gguf,) = (folder / "gguf").glob("*.gguf")
    files = {"text": "text.txt", "grammar": "grammar.gbnf", "vllm_config": "config.yaml"}
    return {"model": small_demo, "gguf": gguf, **{name: folder / file for name, file in files.items()}}


def works(line: str, places: dict) -> bool:
    """Return whether a session ends well. A server is not started, and nothing is downloaded."""
    if line.startswith(">>> "):
        try:
            eval(
                line[4:],
                {"LLM": LLM, "SamplingParams": SamplingParams, "MODEL": places["model"], "PROMPTS": PROMPTS},
            )
        except (TinyGPTError, TypeError):
            return False
        return True
    words = shlex.split(line.format(**places))
    try:
        if words[0] != "serve" and "owner/" not in line:
            return cli.main(words) == 0
        args = cli.parse(words)
        if "owner/" in line:
            from tinygpt.weights.hub import parse

            return parse(args.model).repo_id.startswith("owner/model")
        config_of(args)
        return cli.main(["info", args.model, "--json"]) == 0 and args.dtype in ("auto", "float32")
    except (SystemExit, TinyGPTError):
        return False


@pytest.mark.parametrize(("line", "is_refused"), sessions())
def test_a_session_of_another_program(line, is_refused, places, monkeypatch):
    monkeypatch.setattr(sys, "stdin", open("/dev/null"))  # noqa: SIM115
    assert works(line, places) != is_refused
