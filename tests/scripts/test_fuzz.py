"""scripts/fuzz.py: a sample of what it does, what it would find, and that it survives what it finds."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from random import Random

import pytest

from scripts.fuzzing import company, findings, loaders, minimise
from scripts.fuzzing.binary_mutators import edit_metadata
from scripts.fuzzing.cases import Case, Input, Mutation, case_of
from scripts.fuzzing.formats import FORMATS
from scripts.fuzzing.random_requests import FIELDS, World, request_of
from scripts.fuzzing.seeds import write_world
from scripts.fuzzing.supervisor import Campaign, Judge, Report
from scripts.fuzzing.worker import Bench, Limits, Outcome
from support import sabotage
from support.examples import examples
from support.paths import ROOT
from support.recorded import needs_transformers
from tinygpt import SamplingParams
from tinygpt.engine import kv_slots
from tinygpt.tokenizer.prepared import PREPARED_FILE, read_prepared

pytestmark = pytest.mark.filterwarnings("ignore:Duplicate name")  # of zip entries, on purpose

ALL = tuple(FORMATS)
CASES = sorted((ROOT / "tests" / "data" / "fuzz").iterdir())
# A machine that does other things may be slow: a load that hangs takes longer than any of this.
PATIENT = Limits(seconds=30.0)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("fuzz"), PATIENT)


# --- files


@pytest.mark.parametrize(("inputs", "lucky"), [(500, 5), pytest.param(1500, 0, marks=pytest.mark.slow)])
def test_a_sample_of_damaged_files(inputs, lucky):
    """lucky: of how many formats every damage may matter."""
    report = Campaign(seed=12, formats=ALL, inputs=inputs, seconds=None, workers=2, limits=PATIENT).run()
    assert [f"{outcome.what} by {case}" for found in report.findings.values() for case, outcome in found] == []
    assert report.counts.total() == inputs
    # Of a TensorFlow bundle hardly a byte is without a checksum, and of exported kernels none.
    assert (
        len({*ALL} - {"openai_tf", "kernel-archive"} - {name for name, kind in report.counts if kind == "right"})
        <= lucky
    )
    # A damaged kernel is compiled again, and in place of a damaged prepared tokenizer its own files are read.
    assert {name for name, kind in report.counts if kind == "refused"} == {*ALL} - {"kernel", PREPARED_FILE}


@pytest.mark.slow
@pytest.mark.parametrize("format", [name for name, format in FORMATS.items() if format.load is loaders.tensors])
def test_two_thousand_damaged_checkpoints_of_each_kind(format):
    report = Campaign(seed=7, formats=(format,), inputs=2000, seconds=None, workers=2, limits=PATIENT).run()
    assert [f"{outcome.what} by {case}" for found in report.findings.values() for case, outcome in found] == []
    assert report.counts.total() == 2000


@pytest.mark.parametrize("place", CASES, ids=lambda place: place.name)
def test_what_once_broke(bench, place):
    outcome = bench.run(findings.read(place))
    assert outcome.kind != "finding", outcome


@pytest.mark.parametrize(
    ("harm", "format", "inputs", "what"),
    [
        pytest.param(
            *(sabotage.execute_pickles, "torch-legacy", 60, "reached outside: pickle"), marks=needs_transformers
        ),
        pytest.param(
            *(sabotage.believe_views, "torch-zip", 800, "ValueError in mapped_file.py"), marks=needs_transformers
        ),
        (sabotage.forget_checksums, "packed-float32", 200, "wrong: its checksum"),
        (sabotage.forget_checksums, "session", 200, "wrong: its checksum"),
        (sabotage.trust_kernels, "kernel", 60, "wrong: other machine code"),
        (sabotage.trust_prepared, PREPARED_FILE, 150, "wrong: its digest is wrong"),
    ],
)
def test_a_check_that_is_taken_out_is_found(harm, format, inputs, what):
    report = Campaign(1, (format,), inputs, seconds=None, workers=1, limits=PATIENT, patch=harm).run()
    assert any(found.startswith(what) for _, found in report.findings), list(report.findings)


def test_a_file_outside_is_seen():
    file = "model.safetensors.index.json"
    index = FORMATS["safetensors-shards"].files()[file].replace(b"model-00001-of-00002.safetensors", b"../canary")
    for harm, what in ((sabotage.follow_shards_anywhere, "reached outside: read"), (None, "")):
        judge = Judge(PATIENT, harm)
        assert judge.outcome(Input("safetensors-shards", file, index)).what[: len("reached outside: read")] == what
        judge.close()


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (sabotage.read_for_ever, "takes too long"),
        (sabotage.allocate, "MemoryError in"),
        (sabotage.crash, "the process dies: SIGSEGV"),
    ],
)
def test_whatever_a_loader_does_is_survived(harm, what):
    judge = Judge(Limits(seconds=0.5), harm)
    undamaged = FORMATS["golden.npz"].files()["golden.npz"]
    assert judge.outcome(Input("golden.npz", "golden.npz", b"x")).what.startswith(what)
    assert judge.outcome(Input("golden.npz", "golden.npz", undamaged)).kind == "right"
    judge.close()


def test_a_campaign_goes_on_behind_what_kills_its_workers():
    report = Campaign(1, ("golden.npz",), 30, None, workers=2, limits=PATIENT, patch=sabotage.crash).run()
    assert report.counts.total() == 30
    undamaged = FORMATS["golden.npz"].files()["golden.npz"]
    sizes = [len(case_of(1, i, ("golden.npz",)).input(undamaged).data) for i in range(30)]
    assert report.counts["golden.npz", "finding"] == sum(size != len(undamaged) for size in sizes) > 1


def test_an_input_follows_from_seed_and_number():
    cases, again, others = ([case_of(seed, i, ALL) for i in range(500)] for seed in (3, 3, 4))
    assert cases == again != others
    assert {case.format for case in cases} == {*ALL}


@pytest.mark.parametrize("name", ALL)
def test_every_mutator_of_a_format_changes_its_files(name):
    format = FORMATS[name]
    files = format.files()
    assert files == format.files()  # or a seed would not say which input it is
    for file, mutators in format.targets.items():
        for mutator in mutators:
            case = Case(name, file, (Mutation(mutator.__name__, 0),))
            tries = (replace(case, mutations=(Mutation(mutator.__name__, i),)) for i in range(20))
            assert any(tried.input(files[file]).data != files[file] for tried in tries), mutator.__name__


def test_seals_make_checksums_right(bench):
    for format in FORMATS.values():
        if format.seal and format.name != PREPARED_FILE:
            file, place, said = _sealed(format)
            undamaged = format.files()[file]
            other = bytearray(undamaged)
            other[place(undamaged)] ^= 1
            other = bytes(other)
            damaged = bench.run(Input(format.name, file, other))
            assert (damaged.kind, said in damaged.detail) == ("refused", True)
            assert said not in bench.run(Input(format.name, file, format.seal(other, Random(0)))).detail


def test_a_prepared_tokenizer_is_read_where_it_is_sealed(tmp_path):
    format = FORMATS[PREPARED_FILE]
    for file, data in format.files().items():
        (tmp_path / file).write_bytes(data)
    other = format.files()[PREPARED_FILE] + b" "
    for data, is_read in ((other, False), (format.seal(other, Random(0)), True)):
        (tmp_path / PREPARED_FILE).write_bytes(data)
        assert (read_prepared(tmp_path) is not None) == is_read


def _sealed(format):
    """The file of a format that has a checksum, a byte that it is of, and what is said where it is wrong."""
    if format.name == "openai_tf":
        return next(name for name in format.targets if name.endswith(".index")), lambda data: 20, "checksum"
    if format.name == "kernel-archive":  # the end of the header: the last kernel's digest
        return "kernels.bin", lambda data: data.index(b'"]]}') - 1, "its header cannot be read"
    return (
        next(name for name, mutators in format.targets.items() if edit_metadata in mutators),
        lambda data: -1,
        "checksum",
    )


def test_findings_are_shrunk_and_can_be_tried_again(tmp_path):
    undamaged = bytes(range(200))
    given = Input("golden.npz", "golden.npz", b"abc" + undamaged[3:90] + b"xyz" + undamaged[93:])
    smaller = minimise.fewer_bytes(given, undamaged, lambda tried: b"y" in tried.data[91:92])
    assert [i for i in range(200) if smaller.data[i] != undamaged[i]] == [91]
    case = Case("golden.npz", "golden.npz", tuple(Mutation("flip_bits", i) for i in range(5)))
    shorter = minimise.fewer_mutations(case, lambda tried: Mutation("flip_bits", 3) in tried.mutations)
    assert shorter.mutations == (Mutation("flip_bits", 3),)
    report = Report(Counter(), {("golden.npz", "a word"): [(shorter, Outcome("finding", "a word", "more"))]})
    (place,) = findings.keep(report, tmp_path)
    assert findings.read(place) == shorter.input(FORMATS["golden.npz"].files()["golden.npz"])
    assert json.loads((place / "finding.json").read_text())["detail"] == "more"


# --- requests


def test_requests_cover_every_field():
    assert FIELDS.keys() | {"seed"} == {field.name for field in fields(SamplingParams)}
    world = World(272, 64, 16, ("soft",))
    requests = [request_of(1, i, world) for i in range(2000)]
    assert {name for request in requests for name in request.fields} >= FIELDS.keys()
    assert {request.entry for request in requests} == company.ASK.keys()


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    return folder


def test_requests_in_company_and_alone(world):
    count = examples(60)
    for model, options, _ in company.settings(world):
        if model != "demo":
            comparison = company.compare(model, 1, range(count), lambda count: None, **options)
            assert comparison.differences == []
            assert comparison.ends["answered"] > count / 2 < comparison.ends.total() - count / 12


@pytest.mark.parametrize(("resident", "blocks", "grew"), [(0, 0, 1.0), (5, 0, 1.2), (0, 3, 1.2)])
def test_memory_that_grows_is_seen(resident, blocks, grew):
    """By 5 or 3 in a thousand requests, of 100."""
    memory = [company.Memory(i, 100 + i * resident // 1000, 100 + i * blocks // 1000) for i in range(200, 10_001, 200)]
    comparison = company.Comparison(Counter(answered=10_000), [], memory)
    assert comparison.growth() == pytest.approx(grew, abs=0.05)


def test_a_request_that_sees_others_is_found(world, monkeypatch):
    """Whatever a slot holds is taken for the beginning of any longer prompt."""
    monkeypatch.setattr(kv_slots, "_goes_on", lambda prompt, held: len(prompt) > len(held))
    (model, options, _), *_ = company.settings(world)
    assert company.compare(model, 1, range(100), lambda count: None, **options).differences


# --- the command


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "fuzz.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_the_command(tmp_path):
    done = run("files", "--inputs", "40", "--workers", "1", "--formats", "golden.npz", "--findings", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "seed 1, 40 inputs" in done.stdout
    assert "| all |" in done.stdout
    assert "no format x" in run("files", "--formats", "x").stderr


def test_coverage_says_what_it_needs(tmp_path, monkeypatch):
    (tmp_path / "atheris.py").write_text("raise ImportError")  # absent, whatever is installed
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert "pip install atheris" in run("coverage").stderr
