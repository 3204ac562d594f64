"""scripts/gpu/first_contact.py without a GPU: its checks on a simulated GPU, its kernels compiled, what goes wrong."""

import json
import subprocess
import sys

import numpy as np
import pytest

from scripts.gpu import first_contact
from support.cuda_compile import compile_kernel
from support.cuda_device import on_a_gpu, why_no_gpu
from support.tables import rows
from support.tiny_checkpoint import write_one_layer
from tinygpt import LLM
from tinygpt.kernels.cuda import device as devices

SMALL = {
    "mma": first_contact.mma,
    "grant": lambda device: first_contact.grant(device, kib=60),
    "graph": lambda device: first_contact.graph(device, nodes=3, blocks=2, threads=32),
}


@pytest.mark.toolchain
@pytest.mark.parametrize("item", SMALL)
def test_a_simulated_gpu_passes(device, item):
    SMALL[item](device)


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("item", SMALL)
def test_a_gpu_passes(item):
    SMALL[item](devices.the_device())


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", first_contact.LIMITS)
def test_a_gpu_passes_with_a_small_model(dtype, tmp_path):
    first_contact.decode(str(write_one_layer(tmp_path, 40)), dtype, prompt=20, steps=9, repeats=1)


def test_items_that_others_rely_on_come_first():
    small = [f"tiny {dtype}" for dtype in first_contact.LIMITS]
    assert list(first_contact.items())[:9] == ["versions", *SMALL, *small, "decode 124M"]


@pytest.mark.toolchain
@pytest.mark.parametrize("factor", [pytest.param(1.1, marks=pytest.mark.slow), np.nan])
def test_other_logits_are_no_result(device, monkeypatch, factor, tmp_path):
    logits = LLM.logits

    def wrong(llm, ids):
        return np.float32(1.0 if "device='reference'" in repr(llm) else factor) * logits(llm, ids)

    monkeypatch.setattr(LLM, "logits", wrong)
    with pytest.raises(AssertionError, match="the relative error is"):
        first_contact.decode(str(write_one_layer(tmp_path, 40)), "float32", prompt=2, steps=1)


@pytest.mark.parametrize(
    ("program", "expected"),
    rows("""
print('a word'); print('{"us": 1}') | {"us": 1}
import time; time.sleep(60) | {"error": "stopped after 2 s"}
import os; os.abort() | {"error": "the process ended with -6; see stderr"}
"""),
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


FLOATS = np.zeros(8, np.float32)
INTS = np.zeros(8, np.int32)
HALVES = np.zeros(8, np.uint16)


@pytest.mark.toolchain
def test_the_probes_compile():
    compiled = compile_kernel(first_contact.multiply, FLOATS, HALVES, HALVES)
    assert compiled.ptx.count("mma.sync") == 2
    assert compile_kernel(first_contact.reverse, FLOATS, FLOATS, 1).shared_bytes == 0
    compiled = compile_kernel(first_contact.count_up, INTS)
    assert compiled.registers < 32
    assert "griddepcontrol.launch_dependents" in compiled.ptx
