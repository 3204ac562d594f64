"""What one run has settled, so that a second one with --slow and the extra `parity` takes the rest alone.

A test is settled if it has passed, and asked for nothing that the second run answers otherwise: random examples, of
which there are more then, and answers of libraries that were recorded, or that its source names.
"""

import functools
import inspect
import re
from pathlib import Path

import pytest

LIBRARIES = re.compile(r"torch|transformers|peft|openai|gguf|onnx|matplotlib")
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
    source = inspect.getsource(item.function) + item.nodeid
    return hasattr(item.function, "hypothesis") or bool(LIBRARIES.search(source)) or _branches(item.path)


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
