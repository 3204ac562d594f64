"""`tinygpt bench`: what it prints and writes, and what it refuses before any work."""

import json
import math
import sys
from pathlib import Path

import pytest

from support.bench_records import LIMITS
from support.family_models import write_family
from support.tables import rows
from tinygpt.bench import sweep
from tinygpt.cli import main as cli
from tinygpt.errors import CheckpointError

QUICK = "bench --random tiny --batch-sizes 1,2 --prompt-lengths 4 --new-tokens 3 --repetitions 2 --threads 1"


@pytest.fixture
def no_limits(monkeypatch):
    """Measuring the machine takes a while."""
    monkeypatch.setattr(sweep, "measure_limits", lambda dtype, threads, device: LIMITS)


def test_the_command_prints_a_table(no_limits, capsys):
    assert cli.main([*QUICK.split(), "--dtype", "int8", "--kv-cache-dtype", "Q8_0"]) == 0
    out, err = capsys.readouterr()
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith("| random:tiny ")]
    assert [(row[2], row[5]) for row in rows] == [("int8", "pp4"), ("int8", "tg3 @ d4")] * 2
    assert "4 cases of random:tiny" in err


def test_the_command_writes_records(no_limits, capsys, tmp_path):
    file = tmp_path / "records.json"
    assert cli.main([*QUICK.split(), "--dtype", "float32,int8", "--output", str(file)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("| model | dtype |")  # the table is shown as well
    assert out.count("| random:tiny |") == 8
    assert f"the results are in {file}" in err
    found = json.loads(file.read_text(encoding="utf-8"))
    assert [(r["dtype"], r["batch_size"], r["n_prompt"], r["n_gen"], r["n_depth"]) for r in found] == [
        (dtype, size, *counts)
        for dtype in ("float32", "int8")
        for size in (1, 2)
        for counts in ((4, 0, 0), (0, 3, 4))
    ]
    for record in found:
        assert len(record["samples_ns"]) == len(record["samples_ts"]) == 2
        assert all(math.isfinite(v) and v >= 0 for v in record.values() if isinstance(v, (int, float)))


@pytest.mark.slow  # kernels of each kind compile for half a minute
@pytest.mark.parametrize("name", ["opt", "bloom-6"])
def test_other_families_are_measured_as_gpt2_is(name, no_limits, capsys, tmp_path):
    folder = write_family(tmp_path, name)
    flags = "--batch-sizes 1,2 --prompt-lengths 4 --new-tokens 3 --repetitions 1 --threads 1 --json"
    assert cli.main(["bench", "--model", str(folder), *flags.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    found = [(r["batch_size"], r["n_prompt"], r["n_gen"], r["n_depth"]) for r in found]
    assert found == [(size, *counts) for size in (1, 2) for counts in ((4, 0, 0), (0, 3, 4))]


def test_a_terminal_has_aligned_columns(no_limits, capsys, monkeypatch):
    printed = []
    for is_terminal, flags in (
        (False, []),
        (True, []),
        (True, ["--format", "md"]),
        (False, ["--format", "text"]),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal, raising=False)
            assert cli.main([*QUICK.split(), *flags]) == 0
        printed.append(capsys.readouterr().out.split()[0])
    assert printed == ["|", "model", "|", "model"]


@pytest.mark.parametrize(
    ("name", "more", "begins", "num_lines"),
    rows(r"""
x.CSV | [] | "\"" | 5
x.jsonl | [] | "{" | 4
x.txt | [] | "|" | null
x.json | ["--format", "md"] | "|" | null
"""),
)
def test_the_format_is_the_ending_of_the_file(no_limits, tmp_path, name, more, begins, num_lines):
    assert cli.main([*QUICK.split(), *more, "--output", str(tmp_path / name)]) == 0
    text = (tmp_path / name).read_text(encoding="utf-8")
    assert text.startswith(begins)
    assert num_lines in (None, len(text.splitlines()))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_results_that_cannot_be_written_are_printed(no_limits, capsys):
    assert cli.main([*QUICK.split(), "--json", "--output", "/dev/full"]) == 1
    out, err = capsys.readouterr()
    assert len(json.loads(out)) == 4
    assert "/dev/full" in err


def test_an_interruption_leaves_what_was_measured(no_limits, capsys, monkeypatch):
    def interrupted(llm, case, repetitions, meter):
        if case.batch_size == 2:
            raise KeyboardInterrupt
        return measure(llm, case, repetitions, meter)

    measure = sweep.measure
    monkeypatch.setattr(sweep, "measure", interrupted)
    assert cli.main([*QUICK.split(), "--json"]) == 130
    assert [record["test"] for record in json.loads(capsys.readouterr().out)] == ["pp4", "tg3 @ d4"]


@pytest.mark.parametrize(("dtypes", "code", "num_records"), [("float32,int8", 1, 4), ("int8,float32", 2, 0)])
def test_a_dtype_that_cannot_be_loaded(no_limits, capsys, monkeypatch, dtypes, code, num_records):
    """Before any result it is a refusal, after some a failure."""
    llm = sweep.LLM

    def load(model, dtype, **options):
        if dtype == "int8":
            raise CheckpointError("damaged.")
        return llm(model, dtype, **options)

    monkeypatch.setattr(sweep, "LLM", load)
    assert cli.main([*QUICK.split(), "--format", "jsonl", "--dtype", dtypes]) == code
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == num_records
    assert "damaged." in err


@pytest.mark.parametrize(("form", "begins"), [("md", "## cpu-study"), ("jsonl", '{"preset": "cpu-study"')])
def test_a_preset_that_stops_midway_leaves_what_was_measured(capsys, monkeypatch, form, begins):
    def load(model, dtype, **options):
        if dtype == "float32":
            raise KeyboardInterrupt
        return llm(model, dtype, **options)

    llm = sweep.LLM
    monkeypatch.setattr(sweep, "LLM", load)
    command = "bench --preset cpu-study --small --random tiny --dtype int8,float32 --threads 1 --repetitions 1 --format"
    assert cli.main([*command.split(), form]) == 130
    out = capsys.readouterr().out
    assert out.startswith(begins)
    assert "Interrupted: cases are missing." in out or form == "jsonl"
    assert out.count("int8") == 1


def test_a_plot_without_matplotlib_is_refused(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main([*QUICK.split(), "--plot", "picture.png"]) == 2
    assert "[plot]" in capsys.readouterr().err
