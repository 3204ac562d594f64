"""Budgets of size: code tokens of each room, with 2 % of slack for small options.

A new capability that needs more names in its commit what it displaces, or why the room grows.
"""

import ast
import functools
import io
import subprocess
import sys
import tokenize
from dataclasses import astuple, dataclass
from pathlib import Path

from support.paths import ROOT

OBJECTS = ROOT / "kernels" / "cpu" / "objects"
PACKAGES = ("tinygpt", "kernels", "weights", "scripts")
# Code tokens of a room's folders; of tinygpt and kernels, "/*" is each module in no room of its own.
ROOMS = {
    "tinygpt/engine": 32_500,
    "tinygpt/server": 26_300,
    "tinygpt/cli": 23_250,
    "tinygpt/look": 11_400,
    "tinygpt/text": 13_800,
    "tinygpt/bench tinygpt/evaluation": 21_300,
    "tinygpt/*": 28_800,
    "weights": 57_700,
    "kernels/cpu": 59_300,
    "kernels/cuda": 44_500,
    "kernels/*": 10_800,
    "scripts": 32_100,
    "tests": 384_000,
}
BUDGETS = {
    "tokens for 100 lines": 980,
    "modules": 234,
    "modules under 60 lines": 1,
    "tokens for 100 lines of tests": 1_100,
    "lines of READMEs": 1_440,
    "words of prose for 100 lines of code": 144,
    "modules that `generate` imports": 93,
    "kB of object code": 1_470,
}
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
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


@dataclass(frozen=True)
class Size:
    """The size of files. A token of code is no comment, docstring or layout; prose is in docstrings and comments."""

    tokens: int = 0
    code_lines: int = 0
    words_of_prose: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def tokens_for_100_lines(self) -> int:
        return round(100 * self.tokens / self.code_lines)


def size_of(files: list[Path]) -> Size:
    return sum(map(size_of_file, files), Size())


@functools.cache
def size_of_file(file: Path) -> Size:
    text = file.read_text(encoding="utf-8")
    tokens = words_of_prose = 0
    docstring_lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            docstring = node.body[0]
            words_of_prose += len(docstring.value.value.split())
            docstring_lines |= {*range(docstring.lineno, docstring.end_lineno + 1)}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            words_of_prose += len(token.string.lstrip("#").split())
        elif token.type not in LAYOUT and token.start[0] not in docstring_lines:
            tokens += 1
            lines |= {*range(token.start[0], token.end[0] + 1)}
    return Size(tokens, len(lines), words_of_prose)


def num_lines(files: list[Path]) -> int:
    return sum(file.read_text(encoding="utf-8").count("\n") for file in files)


def readmes() -> list[Path]:
    found = [
        ROOT / "README.md",
        *(file for name in (*PACKAGES, "tests") for file in (ROOT / name).rglob("README.md")),
    ]
    return [file for file in found if not any(parent.is_symlink() for parent in file.parents)]


def num_imported() -> int:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return int(done.stderr.split()[-1])


def room_of(file: Path) -> str:
    folder = file.relative_to(ROOT).parent.as_posix()
    for room in ROOMS:
        if any(folder == name or folder.startswith(f"{name}/") for name in room.split()):
            return room
    return f"{folder.partition('/')[0]}/*"


def test_a_room_has_its_number_of_tokens():
    files: dict[str, list[Path]] = {room: [] for room in ROOMS}
    for file in python_files(*PACKAGES, "tests"):
        files[room_of(file)].append(file)
    tokens = {room: size_of(of_room).tokens for room, of_room in files.items()}
    print(tokens)
    assert {room: n for room, n in tokens.items() if n > ROOMS[room]} == {}


def test_budgets():
    """Lines of code have no budget: tokens a line have, so that packing lines gains nothing."""
    code = python_files(*PACKAGES)
    size = size_of(code)
    tests = size_of(python_files("tests"))
    short = [file for file in code if num_lines([file]) < 60]
    found = {
        "tokens for 100 lines": size.tokens_for_100_lines,
        "modules": len(code),
        "modules under 60 lines": sum("__" not in f.name and f.parent.name != "examples" for f in short),
        "tokens for 100 lines of tests": tests.tokens_for_100_lines,
        "lines of READMEs": num_lines(readmes()),
        "words of prose for 100 lines of code": 100 * size.words_of_prose // size.code_lines,
        "modules that `generate` imports": num_imported(),
        "kB of object code": sum(file.stat().st_size for file in OBJECTS.iterdir()) // 1000,
    }
    print(f"{size.code_lines} lines of code, {tests.code_lines} of tests")
    assert {name: n for name, n in found.items() if n > BUDGETS[name]} == {}
