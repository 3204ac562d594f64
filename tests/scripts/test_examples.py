"""The examples of scripts/examples run as they stand, with the demo, and print what they promise."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.foreign import nanogpt
from support.paths import ROOT
from support.recorded import HAS_TRANSFORMERS
from support.tiny_checkpoint import random_tensors
from tinygpt import LLM, aliases
from tinygpt.cli.main import command_parser

EXAMPLES = ROOT / "scripts" / "examples"
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")


def run(name: str, folder: Path, *arguments: str) -> list[str]:
    """Return the lines of an example's stdout."""
    command = [sys.executable, EXAMPLES / name, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def code_of(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_the_table_of_other_programs_names_is_whole():
    rows = [
        line.strip("|").split("|")
        for line in README.splitlines()
        if re.match(r"\| `\w+` \|.*\|.*\|.*\|", line)
    ]
    listed = {code_of(ours)[0]: {*code_of("".join(others))} for ours, *others in rows}
    assert listed == {ours: {*others.split()} for ours, others in aliases.NAMES.items()}
    [ignored] = re.findall(r"Accepted without effect, .*?: (.*?)\n\n", README, re.DOTALL)
    assert {*code_of(ignored)} <= aliases.WITHOUT_VALUE | aliases.WITH_VALUE


def test_methods_and_commands_of_the_readme_exist():
    methods = {word for code in code_of(README) for word in re.findall(r"llm\.(\w+)", code)}
    assert methods >= {"generate", "stream", "logits"}
    assert {name for name in methods if not hasattr(LLM, name)} == set()
    for command in {code.split()[1] for code in code_of(README) if code.startswith("tinygpt ")}:
        assert command_parser(command)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_named(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") < 40
    assert path.name in ast.get_docstring(ast.parse(text))
    assert path.name in README


def test_stories_have_their_beginning(tmp_path):
    lines = run("stories.py", tmp_path, "The little dog")
    assert len({line for line in lines if line.startswith("The little dog")}) >= 3


def test_the_likelier_sentence_comes_first_and_a_bar_is_as_long_as_the_surprise(tmp_path):
    lines = [
        line.split() for line in run("probability.py", tmp_path, "zebra a upon Once", "Once upon a zebra")
    ]
    first, second = lines[0], lines[5]
    assert (first[2:], second[2:]) == (["Once", "upon", "a", "zebra"], ["zebra", "a", "upon", "Once"])
    assert float(first[1]) < float(second[1])
    assert [word for word, *_ in lines[1:5]] == first[2:]
    bars = lines[1:5] + lines[6:]
    assert [len("".join(bar)) for _, _, *bar in bars] == [round(2 * float(bits)) for _, bits, *_ in bars]


def test_guided_objects_are_of_the_schema(tmp_path):
    pytest.importorskip("llguidance")
    pets = [ast.literal_eval(line) for line in run("guided_json.py", tmp_path)]
    assert len(pets) == 3
    for pet in pets:
        assert re.fullmatch("[A-Z][a-z]{2,9}", pet["name"])
        assert (1 <= pet["age"] <= 20, pet["animal"] in ("cat", "dog", "bird")) == (True, True)


def test_openais_client_is_answered(tmp_path):
    pytest.importorskip("openai", reason="openai, of the extra `parity`, is not installed")
    completion, chat, *_ = run("openai_client.py", tmp_path)
    assert completion
    assert chat


def test_nanogpt_becomes_a_folder_and_a_gguf(tmp_path):
    checkpoint = nanogpt(tmp_path / "out", random_tensors(prefix=""))
    checkpoint.with_name("config.json").write_text(json.dumps({"activation_function": "gelu_new"}))
    lines = [line.partition("] ") for line in run("nanogpt_export.py", tmp_path, str(checkpoint), "exported")]
    readers = ["ckpt.pt", "safetensors", "model.gguf"] + ["transformers"] * HAS_TRANSFORMERS
    assert [name for _, _, name in lines] == readers
    assert len({ids for ids, _, _ in lines}) == 1


@pytest.mark.parametrize("name", ["tour.ipynb", "causal_trace.ipynb"])
def test_notebooks_run(tmp_path, monkeypatch, name):
    nbclient = pytest.importorskip("nbclient", reason="nbclient, of the extra `parity`, is not installed")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # in the repository
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert sum(bool(cell.get("outputs")) for cell in notebook.cells) > 3
