"""Budgets of size, which only go down: a change that raises a number here names what it deletes."""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

from support.paths import ROOT

PACKAGES = ("tinygpt", "kernels", "weights", "scripts")
BUDGETS = {
    "lines of Python": 37_777,
    "modules": 231,
    "modules under 60 lines": 3,
    "lines of tests": 37_577,
    "lines of READMEs": 1_240,
    "words of prose for 100 lines of code": 150,
    "modules that `generate` imports": 120,
}
IMPORTED = """
import sys
from tinygpt.__main__ import main
main(["generate", "Once", "--max-tokens", "1", "--device", "cpu"])
print(sum(name.partition(".")[0] == "tinygpt" and getattr(m, "__file__", None) is not None
          for name, m in sys.modules.items()), file=sys.stderr)
"""


def python_files(*folders: str) -> list[Path]:
    found = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    return [file for file in found if not any(parent.is_symlink() for parent in file.parents)]


def words_and_code(text: str) -> tuple[int, int]:
    """Return the number of words in docstrings and comments, and the number of lines of code."""
    words, prose, code = 0, set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            docstring = node.body[0]
            words += len(docstring.value.value.split())
            prose |= {*range(docstring.lineno, docstring.end_lineno + 1)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            words += len(token.string.lstrip("#").split())
        elif token.string.strip():
            code |= {*range(token.start[0], token.end[0] + 1)}
    return words, len(code - prose)


def test_budgets():
    texts = {file: file.read_text(encoding="utf-8") for file in python_files(*PACKAGES)}
    lines = {file: text.count("\n") for file, text in texts.items()}
    words, code = map(sum, zip(*map(words_and_code, texts.values()), strict=True))
    folders = (ROOT, *(ROOT / name for name in (*PACKAGES, "tests")))
    found = [file for folder in folders for file in folder.glob("README.md" if folder == ROOT else "**/README.md")]
    readmes = [file for file in found if not any(parent.is_symlink() for parent in file.parents)]
    imported = subprocess.run([sys.executable, "-c", IMPORTED], cwd=ROOT, capture_output=True, text=True, check=True)
    found = {
        "lines of Python": sum(lines.values()),
        "modules": len(texts),
        "modules under 60 lines": sum(
            n < 60 and "__" not in file.name and file.parent.name != "examples" for file, n in lines.items()
        ),
        "lines of tests": sum(file.read_text(encoding="utf-8").count("\n") for file in python_files("tests")),
        "lines of READMEs": sum(file.read_text(encoding="utf-8").count("\n") for file in readmes),
        "words of prose for 100 lines of code": 100 * words // code,
        "modules that `generate` imports": int(imported.stderr.split()[-1]),
    }
    assert {name: n for name, n in found.items() if n > BUDGETS[name]} == {}
