"""What one run has settled, so that a second one with --slow and the extra `parity` takes the rest alone.

A test is settled if it has passed, and asked for nothing that the second run answers otherwise: random examples, of
which there are more then, and answers of libraries that were recorded, or that its source names: its own, or that of a
constant, an import, a function or a fixture of its file that it uses.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

LIBRARIES = re.compile(r"torch|transformers|peft|openai|gguf|onnx|matplotlib")
WORD = re.compile(r"[A-Za-z_]\w*")
BRANCHES = "HAS_TRANSFORMERS"  # a file that has it does other things where transformers is
OPEN = ("asks for more", True)  # a property of a test's report

_asked = False


def ask_for_more() -> None:
    """The test that runs would do something else in the second run."""
    global _asked
    _asked = True


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--settled-to", metavar="FILE", help="write the tests that this run settles")
    parser.addoption("--but-settled", metavar="FILE", help="leave out those that such a run has settled")


def configure(config: pytest.Config) -> None:
    if file := config.getoption("--settled-to"):
        config.pluginmanager.register(_Watch())
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(_Writer(Path(file)))


def leave_out_settled(config: pytest.Config, items: list[pytest.Item]) -> None:
    if file := config.getoption("--but-settled"):
        settled = set(Path(file).read_text(encoding="utf-8").splitlines())
        left_out = [item for item in items if item.nodeid in settled]
        items[:] = [item for item in items if item.nodeid not in settled]
        config.hook.pytest_deselected(items=left_out)


class _Watch:
    """Marks the reports of tests that ask for more; what a fixture asks for is for all tests of its file."""

    def __init__(self):
        self._files: set[Path] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item):
        global _asked
        _asked = False
        if _names_libraries(item):
            item.user_properties.append(OPEN)
        try:
            return (yield)
        finally:
            if _asked:
                self._files.add(item.path)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item):
        try:
            return (yield)
        finally:
            if _asked or item.path in self._files:
                item.user_properties.append(OPEN)


def _names_libraries(item: pytest.Item) -> bool:
    """And hypothesis is one of them."""
    if hasattr(item.function, "hypothesis") or LIBRARIES.search(item.nodeid) or _branches(item.path):
        return True
    statements, seen = _statements(item.path), set()
    names = {item.nodeid.split("::")[1].partition("[")[0], *item.fixturenames}
    while unseen := (names & statements.keys()) - seen:
        seen |= unseen
        names = {word for name in unseen for word in WORD.findall(statements[name])}
    return any(LIBRARIES.search(statements[name]) for name in seen)


@functools.cache
def _statements(file: Path) -> dict[str, str]:
    """What makes each name that a file defines or imports, in Python: comments are left out."""
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    return {name: ast.unparse(node) for node in nodes for name in _names_made_by(node)}


def _names_made_by(node: ast.stmt) -> set[str]:
    if hasattr(node, "name"):  # a function or a class
        return {node.name}
    inner = list(ast.walk(node))
    stored = {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored | {n.asname or n.name.partition(".")[0] for n in inner if isinstance(n, ast.alias)}


@functools.cache
def _branches(file: Path) -> bool:
    return BRANCHES in file.read_text(encoding="utf-8")


class _Writer:
    """Gathers the reports of all processes, and writes what they settle at the end."""

    def __init__(self, file: Path):
        self._file, self._settled = file, []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed and OPEN not in map(tuple, report.user_properties):
            self._settled.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._file.write_text("\n".join(self._settled) + "\n", encoding="utf-8")
