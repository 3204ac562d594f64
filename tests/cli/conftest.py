"""What tests of the commands share."""

import io
import sys

import pytest

from support.gate import noting
from support.processes import Outcome, Result
from tinygpt import LLM
from tinygpt.text.tokenizer import Tokenizer


@pytest.fixture(scope="module", autouse=True)
def _demo_is_small(demo_is_small):
    """No command depends on the model."""


@pytest.fixture
def call(capsys):
    """A command line in this process, as call("score", "Once upon")."""
    return lambda *words: Outcome(capsys, [*words])


@pytest.fixture
def run(capsys):
    """`generate` in this process, as run("Once --seed 7")."""
    return lambda arguments: Result(capsys, "generate", arguments)


@pytest.fixture
def give_stdin(monkeypatch):
    return lambda data: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.fixture
def encoded(monkeypatch):
    """The texts that any tokenizer has encoded, in order."""
    return noting(monkeypatch, Tokenizer, "encode", lambda self, text, *_: text)


@pytest.fixture(scope="module")
def llm():
    """The demo, its kernels compiled: stderr is then free of the notice of a first run."""
    with LLM("demo") as llm:
        llm.generate("Once", max_tokens=1)
        yield llm
