"""What the tests would miss: one comparison or constant of a file is changed at a time, and its tests are run.

    python scripts/mutate.py                                     # every file of the table below
    python scripts/mutate.py kernels/cpu/sampling/warpers.py     # one file
    python scripts/mutate.py --list                              # what would be changed, without running anything

A mutant that fails a test is dead. One that passes them all is printed with its line: a test is missing, or the two
programs are the same, which `equivalent_mutants.txt` beside this script says with the reason. The status is 1 if there
is a survivor that it does not know. Each mutant runs in a copy of the tree, in a process forked from one that has
imported what they need already, torch and transformers too where these are (Linux). A changed kernel is compiled anew,
which takes 10 to 60 s: those for sampling run as Python first, and are compiled only if that finds nothing.
"""

import argparse
import ast
import contextlib
import importlib
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
PATIENCE = 5  # times the CPU time that a file's tests take: a mutant that takes more never ends, and is dead too
PRELOADED = ("numba", "pytest", "hypothesis", "torch", "transformers", "numpy.testing")

BORDERS, SAMPLING = "tests/sampling/test_warper_borders.py", "tests/sampling/test_sampling.py"
DRAW = "tests/sampling/test_draw.py"
SLOTS, SCHEDULER = "tests/engine/test_kv_slots.py", "tests/engine/test_scheduler.py"
PROCESSORS = "tests/sampling/test_processors.py"
SAMPLER, GUIDED = "tests/sampling/test_sampler.py", "tests/llm/test_guided.py"
LINEAR, DTYPES = "tests/kernels/cpu/test_linear.py", "tests/kernels/cpu/test_dtype_kernels.py"
# Without those of products, which take long to compile.
OPERANDS = "(operand or activations or convert or zeros or bfloat16_is) and not linear_to"
# Each file, and the tests that know it: those that most mutants fail come first. The last three load no model.
TESTS = {
    "kernels/reference/warpers.py": [BORDERS, SAMPLING, "-k", "reference and not cpu_"],
    "kernels/reference/processors.py": [PROCESSORS, "-k", "reference"],
    "kernels/reference/sampling.py": [DRAW, SAMPLING, "-k", "reference and not cpu_"],
    "kernels/cpu/sampling/warpers.py": [BORDERS, SAMPLING, "-k", "cpu or usual"],
    "kernels/cpu/sampling/row.py": [BORDERS, SAMPLING, "-k", "cpu"],
    "kernels/cpu/sampling/sampling.py": [DRAW, SAMPLING, "-k", "cpu or test_draw.py"],
    "kernels/cpu/sampling/processors.py": [PROCESSORS, "-k", "cpu or round"],
    "kernels/cpu/layers/operands.py": [LINEAR, DTYPES, "-k", OPERANDS],
    "tinygpt/sampling/metadata.py": [SAMPLER],
    "tinygpt/sampling/sampler.py": [SAMPLER, GUIDED, "-k", "not forked and not main_one"],
    "tinygpt/engine/scheduler.py": [SCHEDULER],
    "tinygpt/engine/kv_slots.py": [SLOTS, SCHEDULER],
    "tinygpt/engine/prefix_sharing.py": [SCHEDULER],
}
# Kernels that run without Numba too, and those of their tests that do not take long then.
FEW_ROWS = "cpu and not (vocabulary or large or far or cpu_equals or cpu_rounds or draws_follow or round_values)"
AS_PYTHON = {
    "kernels/cpu/sampling/warpers.py": [BORDERS, SAMPLING, "-k", f"{FEW_ROWS} or usual"],
    "kernels/cpu/sampling/row.py": [BORDERS, SAMPLING, "-k", FEW_ROWS],
    "kernels/cpu/sampling/sampling.py": [DRAW, SAMPLING, "-k", f"{FEW_ROWS} or test_draw.py"],
    "kernels/cpu/sampling/processors.py": [PROCESSORS, "-k", "cpu and not neighbours or round"],
}
COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
}  # fmt: skip
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """The text of `file` from `start` to `stop`, in characters, is replaced by `text`."""

    file: str
    line: int
    start: int
    stop: int
    text: str
    source: str

    @property
    def program(self) -> str:
        return self.source[: self.start] + self.text + self.source[self.stop :]

    @property
    def name(self) -> str:
        """The changed line, the change in brackets: it is the same wherever in the file the line stands."""
        begin = self.source.rfind("\n", 0, self.start) + 1
        end = self.source.find("\n", self.stop) % (len(self.source) + 1)
        change = f"[{self.source[self.start : self.stop].strip()} -> {self.text.strip()}]"
        return f"{self.file}: {(self.source[begin : self.start] + change + self.source[self.stop : end]).strip()}"


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """Every mutant of a file; a docstring is no constant."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = source.splitlines()

    def at(line: int, column: int) -> int:
        """The character of a position that `ast` gives in bytes of UTF-8."""
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def span(node: ast.expr) -> tuple[int, int]:
        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)

    for node in ast.walk(ast.parse(source)):
        for start, stop, text in _changes(node, source, span):
            yield Mutant(file, source.count("\n", 0, start) + 1, start, stop, text, source)


def _changes(node: ast.AST, source: str, span) -> Iterator[tuple[int, int, str]]:
    if isinstance(node, ast.Compare):
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            old, new = COMPARISONS[type(operator)]
            between, last = span(left)[1], span(right)[0]
            found = re.search(rf"(?<![<>=!]){re.escape(old)}(?![<>=])", source[between:last])
            yield between + found.start(), between + found.end(), new
    elif isinstance(node, ast.BoolOp):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            between, last = span(left)[1], span(right)[0]
            found = re.search(rf"\b{old}\b", source[between:last])
            yield between + found.start(), between + found.end(), new
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        yield *span(node), repr(_other(node.value))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SWAPPED:
        yield *span(node.func), SWAPPED[node.func.id]


def _other(value: float) -> float:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value * 1.5 or 0.5


def survives(mutant: Mutant, tree: Path, limit: int = 3600, as_python: bool = False) -> int:
    """The seconds of CPU that the file's tests take with the mutant in `tree`, a copy of the project; 0 if one fails.

    limit: seconds of CPU after which they count as failed. Nothing else changes in `tree`.
    """
    path, caches = tree / mutant.file, tempfile.mkdtemp(prefix="mutant-")
    path.write_text(mutant.program)
    try:
        child = os.fork()
        if not child:
            _run_tests(mutant.file, tree, caches, limit, as_python)
        _, status, used = os.wait4(child, 0)
        return 0 if status else math.ceil(used.ru_utime + used.ru_stime)
    finally:
        path.write_text(mutant.source)
        shutil.rmtree(caches, ignore_errors=True)


def _run_tests(file: str, tree: Path, caches: str, limit: int, as_python: bool) -> None:
    """Ends this process: 0 if all tests of the file pass."""
    import resource

    import pytest

    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        os.chdir(tree)
        if file.startswith("kernels/cpu"):  # no other mutant compiles the same
            os.environ["NUMBA_CACHE_DIR"] = caches
        os.environ["PYTHONPATH"], sys.path[0] = str(tree), str(tree)
        sys.dont_write_bytecode = True  # two mutants within a second would share one
        if as_python:
            _do_not_compile()
        status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *(AS_PYTHON if as_python else TESTS)[file]])
    finally:
        os._exit(int(status))


def _do_not_compile() -> None:
    """Have Python run the kernels of sampling, which are imported here."""
    import numba
    import numpy as np

    numba.config.DISABLE_JIT = 1
    row = importlib.import_module("tinygpt.kernels.cpu.sampling.row")
    row._partial_sums = lambda: np.empty(row.PARTIAL_SUMS)  # in place of LLVM instructions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"default: {', '.join(TESTS)}")
    parser.add_argument("--as-python", action="store_true", help="do not compile what survives as Python")
    parser.add_argument("--list", action="store_true", help="name the mutants and run nothing")
    arguments = parser.parse_args()
    unknown = [file for file in arguments.files if file not in TESTS]
    if unknown:
        parser.error(f"no tests are known for {', '.join(unknown)}: name some of {', '.join(TESTS)}")
    files = arguments.files or list(TESTS)
    mutants = [mutant for file in files for mutant in mutants_of(file, (ROOT / file).read_text())]
    if arguments.list:
        print("\n".join(mutant.name for mutant in mutants))
        return 0
    return run(mutants, set(EQUIVALENT.read_text().splitlines()), arguments.as_python)


def run(mutants: list[Mutant], equivalent: set[str], as_python: bool) -> int:
    """as_python: kernels that run as Python are not compiled besides."""

    def ways(file: str) -> list[bool]:
        return [True] * (file in AS_PYTHON) + [False] * (file not in AS_PYTHON or not as_python)

    preload()
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        tree = Path(folder) / "tinygpt"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "__pycache__", "build", ".*_cache"))
        files = dict.fromkeys(mutant.file for mutant in mutants)
        limits = {(file, way): PATIENCE * _cpu_time(file, tree, way) for file in files for way in ways(file)}
        for i, mutant in enumerate(mutants, 1):
            if mutant.name not in equivalent and all(
                survives(mutant, tree, limits[mutant.file, way], way) for way in ways(mutant.file)
            ):
                survivors += 1
                print(f"survives, line {mutant.line}: {mutant.name}", flush=True)
            if i % 20 == 0:
                print(f"{i} of {len(mutants)} mutants, {survivors} survive", file=sys.stderr, flush=True)
    print(f"{len(mutants)} mutants, {survivors} of them survive")
    return int(survivors > 0)


def preload() -> None:
    """Import what is there: without the extra `parity`, tests compare with recorded answers."""
    for name in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


def _cpu_time(file: str, tree: Path, as_python: bool) -> int:
    """Seconds that the tests take with the file as it is."""
    unchanged = Mutant(file, 1, 0, 0, "", (ROOT / file).read_text())
    return survives(unchanged, tree, as_python=as_python) or sys.exit(
        f"{file}: its tests fail as it is: mend it first, or them."
    )


if __name__ == "__main__":
    sys.exit(main())
