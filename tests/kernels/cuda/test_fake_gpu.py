"""The host's side of the backend: tests of a GPU on a fake driver under the real numba-cuda, in another process."""

import subprocess
import sys
from pathlib import Path

import pytest

from support import fake_gpu
from support.paths import ROOT

FILES = ("tests/kernels/cuda/test_engine.py", "tests/kernels/cuda/test_probes.py")
# First requests and graphs; then each dtype. The models of other tests take too long.
FIRST = "says_what_it_is or memory_back or greedy or graph"
FEW = f"{FIRST} or warped or small_model"
ALL = "not two_models and not more_of_each"
CASES = [
    ("9.0", FIRST),
    ("7.5", "greedy or warped or graph or float32"),
    ("8.0", FEW),
    ("8.9", FEW),
    ("10.0", FEW),
]
CASES += [(capability, ALL) for capability in ("8.6", "9.0", "12.0")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    if missing := fake_gpu.why_not():
        pytest.skip(f"needs {missing}")
    return tmp_path_factory.mktemp("fake-gpu")


@pytest.mark.toolchain
@pytest.mark.parametrize(("capability", "chosen"), CASES)
def test_the_tests_of_a_gpu_pass(folder, request, capability, chosen):
    if (capability, chosen) != CASES[0] and not request.config.getoption("--slow"):
        pytest.skip("slow: run with --slow")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "support.fake_gpu",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
    ]
    environment = fake_gpu.environment(folder, capability)
    command += [*FILES, "-k", chosen]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "skipped" not in result.stdout
