"""scripts/faults.py: a short sample of it, and that it would notice."""

import subprocess
import sys

import pytest

from scripts.scenarios.lab import Lab, Run, read_records
from support.paths import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="faults.py is for Linux")

SAMPLE = ("generate_gives_a_beginning", "full_output", "files_in_convert", "arrays_in_convert", "writes_in_convert")


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/faults.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "."}, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_sample_finds_nothing():
    result = run("--seed", "3", "--trials", str(len(SAMPLE)), "--only", *SAMPLE)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    lines = result.stdout.splitlines()
    assert lines[-1].split() == [str(len(SAMPLE)), "trials,", "0", "wrong"]
    assert {line.split()[1] for line in lines[:-1]} == set(SAMPLE)


def test_every_scenario_has_a_name_of_its_own():
    names = run("--list").stdout.split()
    assert len(names) == len(set(names)) > 20
    assert set(SAMPLE) <= set(names)


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (Run(0, "other", ""), "another output"),
        (Run(1, "", "Traceback (most recent call last):\n"), "no sentence"),
        (Run(1, "", "tinygpt: error: unexpected KeyError: 3"), "no sentence"),
        (Run(0, "text", ""), None),
        (Run(1, "", "tinygpt: error: there is none."), None),
        (Run(1, "te", ""), "without a sentence"),
        (Run(120, "text", ""), "exit code 120"),
        (Run(-11, "", ""), "exit code -11"),
        (Run(-1000, "", "hangs"), "exit code -1000"),
    ],
    ids=str,
)
def test_what_counts_as_wrong(end, says):
    problem = end.problem("text")
    assert problem is None if says is None else says in problem


def test_a_failure_without_a_fault_is_wrong():
    assert "nothing was wrong" in Run(1, "", "tinygpt: error: there is none.").problem("text", may_fail=False)


def test_lost_doubled_and_other_records_are_wrong(tmp_path):
    lab, output = Lab(tmp_path), tmp_path / "out"
    lines = [f'{{"id": {i}, "prompt": "a", "outputs": [{i}]}}\n' for i in range(3)]
    output.write_text("".join(lines))
    lab.records = read_records(output)
    assert lab.problem_of_records(output) is None
    output.write_text(lines[0] + lines[2])
    assert lab.problem_of_records(output) == "2 of 3 records, these lost or different: [1]"
    output.write_text("".join(lines) + lines[1])
    assert lab.problem_of_records(output) == "1 records are there twice"
    output.write_text("".join(lines).replace("[1]", "[9]"))
    assert "different: [1]" in lab.problem_of_records(output)
