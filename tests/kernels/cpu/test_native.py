"""Object code of the package: it has the bits that Numba's has, and stays away where it does not belong."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest

from support.paths import ROOT
from tinygpt.kernels.cpu import native
from tinygpt.kernels.cpu.native import FOLDER, MANIFEST, objects, other_code, sources_hash, words_of
from tinygpt.kernels.cpu.simd.targets import TARGET

NEEDS_OBJECTS = pytest.mark.skipif(objects() is None, reason=native.status())
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


def run(dtype: str, threads: int = 2, **environment: str) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    kept["NUMBA_CACHE_DIR"] = os.environ.get("NUMBA_CACHE_DIR", "")
    command = [sys.executable, "-c", RUN, dtype, str(threads)]
    done = subprocess.run(
        command, cwd=ROOT, env=kept | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.skipif(os.name == "nt", reason="a checkout may have other ends of lines")
def test_objects_are_of_these_sources():
    manifest = json.loads(MANIFEST.read_text("ascii"))
    assert manifest["sources"] == sources_hash(), (
        "after the last edit: python scripts/build_kernels.py, 10 minutes"
    )
    assert {row["archive"] for row in manifest["targets"].values()} == {f.name for f in FOLDER.glob("*.xz")}


@NEEDS_OBJECTS
@pytest.mark.parametrize(
    "dtype", ["int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("float32", "int4"))]
)
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
    assert layout == ["Pair", 2, f4, 2, "C", "float", None, "bool", np.dtype(np.int32)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros(4, np.float32), np.zeros(4, np.int32)),
        (np.zeros((2, 2)), np.zeros((2, 2))[:, ::2]),
        (np.zeros(9, np.uint8)[:8].view(np.float32), np.zeros(9, np.uint8)[1:].view(np.float32)),
        (1, 1.0),
        (None, 0),
        (Pair(1, 2), (1, 2)),
    ],
    ids=["dtype", "strides", "alignment", "number", "nothing", "record"],
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
        ("TINYGPT_KERNELS", "objects", ""),
    ],
)
def test_settings_that_ask_for_other_code(name, value, expected):
    assert other_code({name: value}) == expected


@NEEDS_OBJECTS
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sources": "0"}, "the kernels' sources have changed since"),
        ({"targets": {}}, "is not among their targets"),
        ({"targets": []}, "cannot be read"),
        ({"targets": {TARGET.name: {"features": [], "archive": "none.zip.xz"}}}, "cannot be read"),
        (
            {"targets": {TARGET.name: {"features": [], "archive": "manifest.json", "sha256": "0"}}},
            "is damaged",
        ),
    ],
)
def test_objects_that_do_not_fit_are_not_used(monkeypatch, tmp_path, change, told):
    manifest = json.loads(MANIFEST.read_text("ascii"))
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | change))
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    monkeypatch.setattr(native, "MANIFEST", tmp_path / "manifest.json")
    found, reason = native._open.__wrapped__()
    assert found is None
    assert told in reason
