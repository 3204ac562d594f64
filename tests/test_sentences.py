"""Errors begin alike: behind `tinygpt: error: ` stands a small letter, as behind argparse's, or a name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT

NAMES = {"CUDA", "CUDA's", "DST", "RAY_ADDRESS", "ROUGE", "Ray", "SRC"}
FOLDERS = ("tinygpt", "weights", "kernels")


def first_words(file: Path) -> Iterator[str]:
    """Of the sentences with which the module makes errors, where they begin with words of its own."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and node.args and _makes_error(node.func):
            first = node.args[0]
            text = first.values[0] if isinstance(first, ast.JoinedStr) else first
            if isinstance(text, ast.Constant) and isinstance(text.value, str) and text.value.strip():
                yield text.value.split()[0]


def _makes_error(function: ast.expr) -> bool:
    name = getattr(function, "attr", getattr(function, "id", ""))
    return name.endswith("Error") or name in ("Worded", "__init__", "error")


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_sentence_begins_with_a_small_letter_or_a_name(folder):
    found = {str(file.relative_to(ROOT)): [*first_words(file)] for file in (ROOT / folder).rglob("*.py")}
    assert sum(map(len, found.values())) > 10
    capitals = [(file, word) for file, words in found.items() for word in words if word[0].isupper()]
    assert [(file, word) for file, word in capitals if word not in NAMES] == []
