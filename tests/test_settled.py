"""What CI's second run leaves out: tests that the first has passed, and that it would answer in the same way."""

import pytest

from support.apart import printed
from support.paths import ROOT

CONFTEST = """
from support import settled
from support.settled import add_options as pytest_addoption, configure as pytest_configure

def pytest_collection_modifyitems(config, items):
    settled.leave_out_settled(config, items)
"""
TESTS = """
import pytest
from hypothesis import given, strategies
from support.examples import examples
from support.recorded import recorded

@recorded(is_live=False)
def their_answer(): ...

their_answer.recordings.stored["{key}"] = __import__("numpy").zeros(1)

@pytest.fixture(scope="module")
def asked():
    return their_answer()

def test_settled(): pass
@pytest.mark.parametrize("number", [1, 2])
def test_settled_each(number): assert number
def test_fails(): assert 0
def test_skips(): pytest.skip("a library is lacking")
def test_of_more_examples(): assert examples(30)
@given(strategies.integers())
def test_of_random_examples(number): pass
def test_of_recorded_answers(): assert not their_answer()
def test_names_torch(): "torch"
HEAVY = {"numpy", "torch"}
def imports(): return HEAVY
@pytest.fixture
def heavy(): return imports()
def test_of_a_constant(): assert HEAVY
def test_of_a_helper_with_it(): assert imports()
def test_of_a_fixture_with_it(heavy): pass
@pytest.mark.parametrize("program", ["gguf"])
def test_of_a_program(program): pass
def test_of_a_fixture_that_asked(asked): pass
def test_of_the_same_file(): pass
def test_of_the_fixture_again(asked): pass
"""
PROGRAM = f"""
import sys
import pytest
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
pytest.main(["-q", "-p", "no:cacheprovider", "-rA", "--import-mode=importlib", *sys.argv[1:]])
"""


@pytest.fixture
def folder(tmp_path):
    from support.recorded import key_of

    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_a.py").write_text(TESTS.replace("{key}", key_of()))
    (tmp_path / "test_b.py").write_text("def test_of_another_file(): pass\n")
    (tmp_path / "test_c.py").write_text("from support.recorded import HAS_TRANSFORMERS\ndef test_branches(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def run(folder, *options: str) -> set[str]:
    """The tests that ran."""
    out = printed(PROGRAM, f"--rootdir={folder}", *options, str(folder), patience=100)
    return {line.split("::")[1].split(" ")[0] for line in out.splitlines() if line.startswith(("PASSED", "FAILED"))}


@pytest.mark.parametrize(
    "processes", [pytest.param([], id="one"), pytest.param(["-n", "2"], id="two", marks=pytest.mark.slow)]
)
def test_the_second_run_takes_what_the_first_has_not_settled(folder, processes):
    first = run(folder, *processes, "--settled-to", str(folder / "settled"))
    second = run(folder, *processes, "--but-settled", str(folder / "settled"))
    settled = {"test_settled", "test_settled_each[1]", "test_settled_each[2]", "test_of_another_file"}
    assert first - second == settled
    assert second == first - settled
    assert len(first) == 17
