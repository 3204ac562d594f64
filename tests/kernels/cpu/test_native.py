"""Object code of the package: it has the bits that Numba's has, and stays away where it does not belong."""

import functools
import hashlib
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from support.examples import daily
from support.paths import ROOT
from tinygpt import LLM
from tinygpt.errors import RequestError
from tinygpt.kernels.backend import DeviceError
from tinygpt.kernels.cpu import compiler, keys, native
from tinygpt.kernels.cpu.keys import Sources, of_sources
from tinygpt.kernels.cpu.native import (
    FOLDER,
    MANIFEST,
    OTHERS,
    SOURCES,
    asked_of,
    objects,
    other_code,
    words_of,
)
from tinygpt.kernels.cpu.simd import targets
from tinygpt.kernels.cpu.simd.targets import TARGET
from tinygpt.kernels.kernel_cache import fingerprint

NEEDS_OBJECTS = pytest.mark.skipif(objects() is None, reason=native.status())
VERSIONS = {"python": "{}.{}".format(*sys.version_info)} | {
    n: metadata.version(n) for n in ("numba", "llvmlite")
}
MADE_THE_OBJECTS = VERSIONS.items() <= json.loads(MANIFEST.read_text("ascii")).items()
# Prints the hash of logits and of tokens, and whether Numba was imported.
RUN = """
import hashlib, sys
from tinygpt import LLM
with LLM("demo", sys.argv[1], threads=int(sys.argv[2]), max_num_seqs=4) as llm:
    logits = llm.logits("Once upon a time there was a king")
    asked = dict(max_tokens=6, temperature=0.9, top_k=9, top_p=0.9, seed=3, ignore_eos=True)
    plain = llm.generate(["Once", "It was the"], max_tokens=20)
    drawn = llm.generate("Once", **asked, logprobs=2, prompt_logprobs=1, repetition_penalty=1.2)
print(hashlib.sha256(logits.tobytes() + repr([plain, drawn]).encode()).hexdigest(), "numba" in sys.modules)
"""


def run(dtype: str, threads: int = 2, program: str = RUN, **environment: str) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    kept["NUMBA_CACHE_DIR"] = os.environ.get("NUMBA_CACHE_DIR", "")
    command = [sys.executable, "-c", program, dtype, str(threads)]
    done = subprocess.run(
        command, cwd=ROOT, env=kept | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def wrong_objects(manifest: dict, kernels: Path = SOURCES.parent) -> list[str]:
    """Return the objects of the manifest that are not of the sources in `kernels`, or not what the archives have."""
    wrong = []
    for target, row in manifest["targets"].items():
        shas = {member: sha for objects in row["objects"].values() for member, sha in objects.items()}
        content = (FOLDER / row["archive"]).read_bytes()
        with zipfile.ZipFile(io.BytesIO(lzma.decompress(content))) as archive:
            stored = {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}
        right = set(of_sources(shas, asked_of(target, row), kernels))
        wrong += [
            member for member in shas | stored if member not in right or shas[member] != stored.get(member)
        ]
        assert hashlib.sha256(content).hexdigest() == row["sha256"]
    return wrong


def test_objects_are_of_these_sources():
    manifest = json.loads(MANIFEST.read_text("ascii"))
    assert wrong_objects(manifest) == [], "after the last edit: python scripts/build_kernels.py"
    assert {row["archive"] for row in manifest["targets"].values()} == {f.name for f in FOLDER.glob("*.xz")}


@pytest.mark.parametrize("renames_keys", [False, True])
def test_another_instruction_is_noticed_with_hashes_written_by_hand(tmp_path, renames_keys):
    """On any machine: AMX's tiles subtract, and all that says so is the manifest's text."""
    kernels = tmp_path / "kernels"
    shutil.copytree(SOURCES.parent, kernels, ignore=shutil.ignore_patterns("cuda", "objects", "__pycache__"))
    tiles = kernels / "cpu" / "simd" / "amx_tiles.py"
    assert "tdpbsud" in tiles.read_text()
    tiles.write_text(tiles.read_text().replace("tdpbsud", "tdpbssd"))
    manifest = json.loads(MANIFEST.read_text("ascii"))
    manifest["sources"] = fingerprint(kernels / "cpu", "", [kernels / other.name for other in OTHERS])
    if renames_keys:
        sources = Sources(kernels)
        for target, row in manifest["targets"].items():
            row["objects"] = {
                dtype: by_hand(objects, asked_of(target, row), sources)
                for dtype, objects in row["objects"].items()
            }
    assert any("take_steps" in member for member in wrong_objects(manifest, kernels))


def by_hand(objects: dict[str, str], asked: list[str], sources: Sources) -> dict[str, str]:
    """Return a manifest's objects with the keys of other sources."""
    names = [member.rpartition("-")[0] for member in objects]
    keys = [sources.key(name.partition("-")[0], asked) for name in names]
    return {f"{name}-{key}": sha for name, key, sha in zip(names, keys, objects.values(), strict=True)}


# With the versions that made the objects, .ci/run compares bytes (build_kernels.py --check), and .ci/run light bits.
DAILY = [] if MADE_THE_OBJECTS else ["int8"]


@NEEDS_OBJECTS
@pytest.mark.parametrize("dtype", daily(["float32", "int8", "int4"], DAILY))
def test_bits_are_those_of_numba_which_is_not_imported(dtype):
    found, has_numba = run(dtype)
    expected, _ = run(dtype, TINYGPT_KERNELS="compile")
    assert (found, has_numba) == (expected, "False")


@NEEDS_OBJECTS
def test_starts_of_several_threads_and_processes_at_once():
    """Threads that pack weights, and a leader with its followers, link at the same time."""
    with ThreadPoolExecutor(3) as pool:
        starts = list(pool.map(lambda threads: run("bfloat16", threads), [1, 2, 4] * 2))
    assert len(set(map(tuple, starts))) == 1
    assert starts[0][1] == "False"


LOOK = """
import sys
from tinygpt import LLM
with LLM("demo", sys.argv[1], max_num_seqs=1) as llm:
    _, cache = llm.run_with_cache("Once")
    cache.logit_lens()
print("numba" in sys.modules)
"""


@NEEDS_OBJECTS
@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bfloat16", "int4"))]
)
def test_looks_start_without_numba(dtype):
    """As `lens` and `serve --look` do."""
    assert run(dtype, program=LOOK) == ["False"]


class Pair(NamedTuple):
    rows: np.ndarray
    factor: float


def test_words_are_the_fields_of_numbas_arguments():
    rows = np.zeros((3, 4), np.float32)
    words, layout = words_of((Pair(rows, 0.5), None, True, np.int32(-2)))
    half = int(np.float64(0.5).view(np.int64))
    minus_two = int(np.array([-2, 0], np.int32).view(np.int64)[0])
    assert words == [0, 0, 12, 4, rows.ctypes.data, 3, 4, 16, 4, half, 0, 1, minus_two]
    f4 = np.dtype(np.float32)
    assert layout == ["Pair", ("rows", "factor"), f4, 2, "C", "float", None, "bool", np.dtype(np.int32)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros(4, np.float32), np.zeros(4, np.int32)),
        (np.zeros((2, 2)), np.zeros((2, 2))[:, ::2]),
        (np.zeros(9, np.uint8)[:8].view(np.float32), np.zeros(9, np.uint8)[1:].view(np.float32)),
        (1, 1.0),
        (None, 0),
        (Pair(1, 2), (1, 2)),
        (Pair(1, 2), namedtuple("Pair", ["factor", "rows"])(1, 2)),
    ],
    ids=["dtype", "strides", "alignment", "number", "nothing", "record", "order of fields"],
)
def test_arguments_of_other_code_have_another_layout(one, other):
    assert words_of((one,))[1] != words_of((other,))[1]


def test_an_argument_that_has_no_words_goes_to_numba():
    assert words_of((len,))[1] == ["builtin_function_or_method?"]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("NUMBA_OPT", "1", "NUMBA_OPT"),
        ("NUMBA_CACHE_DIR", "/x", ""),
        ("NUMBA_CPU_FEATURES", "+avx2", ""),
        ("TINYGPT_KERNELS", "compile", "TINYGPT_KERNELS"),
        ("TINYGPT_KERNELS", "", ""),
    ],
)
def test_settings_that_ask_for_other_code(name, value, expected):
    assert other_code({name: value}) == expected


@pytest.mark.parametrize("value", ["Compile", "0", "objects"])
def test_other_values_of_the_variable_are_refused(monkeypatch, value):
    monkeypatch.setenv("TINYGPT_KERNELS", value)
    monkeypatch.setattr(native, "_opened", functools.cache(native._opened.__wrapped__))
    told = f"TINYGPT_KERNELS is '{value}', and may be 'compile' or unset."
    with pytest.raises(DeviceError, match=f"^{told}$"):
        native.check_device()
    assert native.status() == f"none: {told}"
    with pytest.raises(RequestError, match=told):
        LLM("demo")


THIS = {"features": [], "archive": "manifest.json", "sha256": "0"}
EMPTY = io.BytesIO()
zipfile.ZipFile(EMPTY, "w").close()


@NEEDS_OBJECTS
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"targets": {}}, "is not among their targets"),
        ({"targets": []}, "cannot be read"),
        ({"targets": None}, "cannot be read"),
        ({"targets": {TARGET.name: 7}}, "cannot be read"),
        ({"targets": {TARGET.name: THIS | {"archive": "none.zip.xz"}}}, "cannot be read"),
        ({"targets": {TARGET.name: THIS | {"archive": 7}}}, "cannot be read"),
        ({"targets": {TARGET.name: THIS | {"features": 7}}}, "cannot be read"),
        ({"targets": {TARGET.name: THIS | {"features": [7]}}}, "is not among their targets"),
        ({"targets": {TARGET.name: THIS}}, "is damaged"),
        ([], "cannot be read"),
        (None, "cannot be read"),
        ("targets", "cannot be read"),
        (b"of another kind", "cannot be read"),
        (lzma.compress(b"of another kind"), "cannot be read"),
        (lzma.compress(EMPTY.getvalue()), "the kernels' sources have changed since"),
    ],
    ids=str,
)
def test_objects_that_do_not_fit_are_not_used(monkeypatch, tmp_path, change, told):
    """bytes: an archive whose hash the manifest has."""
    manifest = json.loads(MANIFEST.read_text("ascii"))
    if isinstance(change, bytes):
        (tmp_path / "odd").write_bytes(change)
        row = manifest["targets"][TARGET.name]
        change = {
            "targets": {TARGET.name: row | {"archive": "odd", "sha256": hashlib.sha256(change).hexdigest()}}
        }
    if isinstance(change, dict):
        change = manifest | change
    (tmp_path / "manifest.json").write_text(json.dumps(change))
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    monkeypatch.setattr(native, "MANIFEST", tmp_path / "manifest.json")
    found, reason = native._opened.__wrapped__()
    assert found is None
    assert told in reason


@NEEDS_OBJECTS
def test_objects_of_other_sources_are_left_alone(monkeypatch):
    """With another hash of the files than the manifest's, each key decides."""
    monkeypatch.setattr(native, "sources_hash", lambda: "0")
    found, reason = native._opened.__wrapped__()
    assert (found.count, reason) == (objects().count, "")
    monkeypatch.setattr(keys, "of_sources", lambda members, *_: [m for m in members if "take_steps" not in m])
    found, reason = native._opened.__wrapped__()
    assert (found.count, reason) == (objects().count - len(steps()), f", and {len(steps())} of other sources")
    monkeypatch.setattr(native, "_opened", lambda: (found, reason))
    assert native.status() == f"{found.count} in the package{reason}"


def steps() -> list[str]:
    return [member for member in objects()._archive.namelist() if "take_steps" in member]


@NEEDS_OBJECTS
def test_a_python_without_liblzma_compiles():
    status = "import sys; sys.modules['_lzma'] = None; from tinygpt.kernels.cpu import native; print(native.status())"
    done = subprocess.run(
        [sys.executable, "-c", status], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "none: manifest.json or an archive cannot be read: " in done.stdout
    assert "_lzma" in done.stdout


def test_a_working_folder_that_may_not_be_searched_is_no_error(monkeypatch):
    """os.stat fails there as for another user's folder of mode 0700."""
    find = os.stat

    def refuse(path, *arguments, **named):
        if str(path) == ".numba_config.yaml":
            raise PermissionError(13, "Permission denied", path)
        return find(path, *arguments, **named)

    monkeypatch.setattr(os, "stat", refuse)
    assert targets.settings() is not None
    assert other_code({}) == ""
    assert compiler.build()


def test_two_threads_that_ask_first_open_the_archive_once(monkeypatch):
    opened = []
    barrier = threading.Barrier(2)

    def read():
        opened.append(1)
        threading.Event().wait(0.1)  # time for the other thread to come
        return None, "read"

    monkeypatch.setattr(native, "other_code", lambda environment: "")
    monkeypatch.setattr(native, "_read", read)
    monkeypatch.setattr(native, "_opened", functools.cache(native._opened.__wrapped__))
    with ThreadPoolExecutor(2) as pool:
        [*pool.map(lambda _: (barrier.wait(), objects()), range(2))]
    assert opened == [1]
