"""scripts/mutate.py: which changes it makes, and that it tells a test that notices from one that does not."""

import subprocess
import sys

import pytest

from scripts import mutate

PROGRAM = '"""0 < 1"""\n\n\ndef is_in(x, low):  # é\n    return low <= x < 10 and x is not True\n'


def test_every_comparison_constant_and_connective_changes_once():
    programs = [mutant.program.splitlines()[-1].strip() for mutant in mutate.mutants_of("a.py", PROGRAM)]
    assert sorted(programs) == [
        "return low < x < 10 and x is not True",
        "return low <= x < 10 and x is True",
        "return low <= x < 10 and x is not False",
        "return low <= x < 10 or x is not True",
        "return low <= x < 11 and x is not True",
        "return low <= x <= 10 and x is not True",
    ]


def test_a_name_does_not_depend_on_the_line_that_the_change_stands_in():
    names = [{mutant.name for mutant in mutate.mutants_of("a.py", text)} for text in (PROGRAM, "\n\n" + PROGRAM)]
    assert names[0] == names[1]
    assert "a.py: return low <= x [< -> <=] 10 and x is not True" in names[0]


@pytest.mark.parametrize(("value", "verdict"), [(17, "True"), (18, "False")])
def test_a_mutant_dies_where_a_test_looks_at_the_border(tmp_path, value, verdict):
    (tmp_path / "age.py").write_text(mutant_source := "def is_adult(age):\n    return age >= 18\n")
    (tmp_path / "test_age.py").write_text(
        f"from age import is_adult\n\n\ndef test_is_adult():\n    assert is_adult({value}) == ({value} > 17)\n"
    )
    program = (
        "import sys\nfrom pathlib import Path\nfrom scripts import mutate\n"
        "mutate.TESTS['age.py'] = ['test_age.py']\n"
        f"(mutant,) = [m for m in mutate.mutants_of('age.py', {mutant_source!r}) if m.text == '>']\n"
        f"print(mutate.survives(mutant, Path({str(tmp_path)!r})) > 0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=mutate.ROOT)
    assert ended.stdout.split() == [verdict], ended.stderr
    assert (tmp_path / "age.py").read_text() == mutant_source


def test_it_runs_without_the_extra_parity(monkeypatch):
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    mutate.preload()


def test_every_known_equivalent_is_still_a_mutant():
    names = {
        mutant.name for file in mutate.TESTS for mutant in mutate.mutants_of(file, (mutate.ROOT / file).read_text())
    }
    known = [line for line in mutate.EQUIVALENT.read_text().splitlines() if line and not line.startswith("#")]
    assert set(known) <= names
