"""scripts/gpu/first_contact.py without a GPU: its checks in the simulator, its kernels compiled, what goes wrong."""

import json
import subprocess
import sys

import numpy as np
import pytest

from scripts.gpu import first_contact, probes
from support.cuda_compile import compile_kernel, is_cooperative
from support.cuda_device import SimulatedDevice, why_no_gpu
from tinygpt.kernels import cuda
from tinygpt.kernels.cuda.persistent import kernel as persistent
from tinygpt.kernels.cuda.runtime import device as devices
from tinygpt.kernels.cuda.runtime.peak import read_kernel
from tinygpt.weights.config import ModelConfig
from tinygpt.weights.random_checkpoint import random_checkpoint

SMALL = {
    "mma": first_contact.mma,
    "grant": lambda device: first_contact.grant(device, kib=1),
    "capture": first_contact.capture,
    "graph": lambda device: first_contact.graph(device, nodes=3, blocks=2, threads=32),
    "barrier": lambda device: first_contact.barrier(device, times=3),
    "read": lambda device: first_contact.read(device, kib=64, loads=(2,)),
    "gemv": lambda device: first_contact.gemv(device, weights=9 * 128, widths=(64, 128)),
}
CONFIG = ModelConfig(n_layer=1, n_embd=64, n_head=1, vocab_size=20, n_positions=64)
ONE_LAYER = random_checkpoint("one layer", CONFIG)


@pytest.fixture
def device(monkeypatch) -> SimulatedDevice:
    device = SimulatedDevice()
    monkeypatch.setattr(devices, "the_device", lambda: device)
    return device


@pytest.fixture
def _run_once(monkeypatch) -> None:
    monkeypatch.setattr(first_contact, "median_seconds", lambda device, run, **_: (run(), (1.0, 1))[1])


@pytest.mark.parametrize("item", SMALL)
@pytest.mark.usefixtures("_run_once")
def test_a_simulated_gpu_passes(device, item):
    json.dumps(SMALL[item](device))


@pytest.mark.usefixtures("_run_once")
def test_a_product_that_is_wrong_is_no_result(device, monkeypatch):
    read = device.read
    monkeypatch.setattr(device, "read", lambda array: np.float32(1.001) * read(array))
    with pytest.raises(first_contact.WrongResult, match=r"numbers are off by 0\.001 of what they should be"):
        SMALL["gemv"](device)


def test_items_come_in_the_order_in_which_one_needs_to_know_them():
    before_models = ["versions", "mma", "grant", "capture", "barrier", "graph", "read", "gemv"]
    models = [f"three layers {dtype}" for dtype in ("float32", "bfloat16", "int8")]
    assert list(first_contact.items())[:12] == [*before_models, *models, "decode 124M"]


@pytest.mark.slow
@pytest.mark.usefixtures("_run_once")
def test_a_small_model_passes_both_ways(device):
    found = first_contact.decode(device, ONE_LAYER, "bfloat16", prompt=3, steps=1)
    assert found["ms a token by graphs"] == found["ms a token in one kernel"] == 1000
    json.dumps(found)


@pytest.mark.slow
@pytest.mark.usefixtures("_run_once")
def test_other_tokens_are_no_result(device, monkeypatch):
    monkeypatch.setattr(persistent, "run_persistent", lambda *arguments: np.full((1, 1), 99))
    with pytest.raises(first_contact.WrongResult, match="1 of 1 numbers are wrong, the first, number 0, is 99 in pl"):
        first_contact.decode(device, ONE_LAYER, "bfloat16", prompt=3, steps=1)


@pytest.mark.parametrize(
    ("factor", "message"),
    [pytest.param(1.1, r"numbers are off by 0\.\d+ of", marks=pytest.mark.slow), (np.nan, "off by nan")],
)
def test_other_logits_are_no_result(device, monkeypatch, factor, message):
    forward = cuda.forward
    monkeypatch.setattr(cuda, "forward", lambda *arguments: np.float32(factor) * forward(*arguments).copy())
    with pytest.raises(first_contact.WrongResult, match=message):
        first_contact.decode(device, ONE_LAYER, "float32", prompt=2, steps=1)


def test_the_median_is_of_what_comes_after_the_warm_up(device):
    calls = []
    _, runs = first_contact.median_seconds(device, lambda: calls.append(1), repeats=3)
    assert runs == len(calls) == 5


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("""print('a word'); print('{"us": 1}')""", {"us": 1}),
        ("import time; time.sleep(60)", {"error": "it was stopped after 2 s"}),
        ("import os; os.abort()", {"error": "its process ended with -6, and stderr says why"}),
    ],
)
def test_an_item_that_goes_wrong_is_one_line(program, expected):
    assert first_contact.run_apart([sys.executable, "-c", program], seconds=2) == expected


@pytest.mark.skipif(not why_no_gpu(), reason="there is a GPU")
def test_without_a_gpu_each_item_says_so(tmp_path):
    command = [sys.executable, first_contact.__file__, "--items", "versions", "mma"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 1
    assert [line["item"] for line in lines] == ["versions", "mma"]
    assert all(line["error"] == f"DeviceError: {why_no_gpu()}" for line in lines)


WORDS, FLOATS, INTS = np.zeros(8, np.uint32), np.zeros(8, np.float32), np.zeros(8, np.int32)
HALVES = np.zeros(8, np.uint16)


@pytest.mark.toolchain
def test_the_probes_compile():
    compiled = compile_kernel(probes.multiply, FLOATS, HALVES, HALVES)
    assert compiled.ptx.count("mma.sync") == 2
    for loads in (1, 8):
        compiled = compile_kernel(read_kernel(loads), WORDS, WORDS, 1)
        assert compiled.spilled == compiled.stack == 0
        assert compiled.ptx.count("ld.global.L1::no_allocate.v4") == loads
    assert compile_kernel(probes.reverse, FLOATS, FLOATS, 1).shared_bytes == 0
    assert compile_kernel(probes.count_up, INTS).registers < 32
    assert "griddepcontrol.launch_dependents" in compile_kernel(probes.count_up_early, INTS).ptx
    assert is_cooperative(probes.meet, INTS, INTS, INTS, 1, 1)
