"""scripts/fuzz.py: a sample of what it does, the inputs that it found once, and harm that it finds."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import fuzz
from support.examples import examples
from support.paths import ROOT

DATA = ROOT / "tests" / "data" / "fuzz"
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc are Linux's"),
    pytest.mark.filterwarnings("ignore:Duplicate name"),  # of zip entries, on purpose
]


@pytest.fixture(scope="module")
def watch():
    return fuzz.Watch()


@pytest.mark.parametrize("name", fuzz.FORMATS)
def test_damaged_files_are_right_or_refused(name, watch, tmp_path):
    if name.startswith("torch"):
        pytest.importorskip("torch", reason="needs torch: pip install -e '.[parity]'")
    fuzz.fuzz_format(name, examples(12), 1, tmp_path, watch)


@pytest.mark.parametrize("place", sorted(DATA.iterdir()), ids=lambda place: place.name)
def test_inputs_that_once_broke_a_reader(place, watch, tmp_path):
    file = next(path for path in place.iterdir() if path.name != "finding.json")
    folder = tmp_path.resolve()
    fuzz.write_all(
        folder, {file.name: file.read_bytes(), "tokenizer_config.json": b'{"do_lower_case": true}'}
    )
    load = fuzz.FORMATS["golden.npz"].load if file.suffix == ".npz" else fuzz.load_tokenizer
    fuzz.check_load(fuzz.Format(dict, load), folder, None, watch)


def read_outside(folder: Path) -> None:
    Path("/etc/hostname").read_bytes()


def start_a_process(folder: Path) -> None:
    subprocess.run(["true"], check=False)


def crash_for_zeros(folder: Path) -> list:
    if b"\0\0\0\0" in (folder / "golden.npz").read_bytes()[:20]:
        raise KeyError("x")
    return []


@pytest.mark.parametrize(
    ("load", "error"),
    [(read_outside, AssertionError), (start_a_process, PermissionError), (crash_for_zeros, KeyError)],
)
def test_a_reader_that_does_harm_is_found_and_its_files_are_kept(load, error, watch, tmp_path, monkeypatch):
    calls = []

    def load_damaged(folder: Path):
        calls.append(folder)
        return load(folder) if len(calls) > 1 else []  # the first load is of undamaged files

    monkeypatch.setitem(fuzz.FORMATS, "golden.npz", replace(fuzz.FORMATS["golden.npz"], load=load_damaged))
    with pytest.raises(error):
        fuzz.fuzz_format("golden.npz", 500, 1, tmp_path, watch)
    assert (tmp_path / "golden.npz" / "golden.npz").is_file()


def test_a_checksum_that_is_not_checked_is_found(watch, tmp_path, monkeypatch):
    monkeypatch.setattr("tinygpt.weights.checkpoint.crc32_of", lambda *_: AnyText("0"))
    with pytest.raises(AssertionError, match="loaded something else"):
        fuzz.fuzz_format("packed-float32", 300, 1, tmp_path, watch)


class AnyText(str):
    """Equal to every text."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def test_the_command_reports_each_format(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "scripts" / "fuzz.py"),
        "--examples",
        "5",
        "--formats",
        "golden.npz",
    ]
    options = {"env": {**os.environ, "PYTHONPATH": ""}, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([*command, "lora"], cwd=tmp_path, **options)
    assert (done.returncode, done.stdout.split("\n")) == (0, ["golden.npz: fine", "lora: fine", ""]), (
        done.stderr
    )
