"""`tinygpt doctor`: its report on the machine agrees with the kernels."""

import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from support.processes import run_process
from support.tables import rows
from tinygpt import hardware
from tinygpt.cli import main as cli
from tinygpt.cli.doctor import driver, instructions
from tinygpt.kernels.cpu import compiler
from tinygpt.kernels.cpu.simd import targets
from tinygpt.weights.config import DTYPES


@pytest.fixture
def report(capsys, monkeypatch) -> dict:
    monkeypatch.setattr(hardware, "read_bandwidth", lambda threads: 1e9 * threads)
    assert cli.main(["doctor", "--json", "--threads", "2"]) == 0
    return json.loads(capsys.readouterr().out)


def test_versions_threads_and_the_cache(report):
    assert report["versions"]["numpy"] == np.__version__
    assert report["versions"]["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert report["threads"]["used"] == report["memory"]["threads"] == 2
    assert report["memory"]["read_bandwidth"] == 2e9
    assert report["threads"]["logical_cores"] == os.cpu_count()
    folder = compiler.kernel_cache().folder
    assert report["cache"]["folder"] == str(folder)
    assert report["cache"]["kernels"] == len(list(folder.glob("*.kernel")))


def test_what_the_memory_allows(report):
    """At 2 GB/s: each weight of GPT-2 124M's blocks and head is read for a token."""
    in_blocks = 12 * 12 * 768 * 768
    in_head = 50257 * 768
    sizes = {"float32": 4 * (in_blocks + in_head), "int4": 0.625 * in_blocks + in_head}
    rates = report["decode_limits"]["tokens_per_second"]
    assert {dtype: rates[dtype] for dtype in sizes} == pytest.approx(
        {d: 2e9 / size for d, size in sizes.items()}
    )
    assert set(rates) == set(DTYPES)


@pytest.mark.parametrize("target", targets.TARGETS, ids=lambda target: target.name)
def test_every_target_says_what_it_expects_of_each_dtype(monkeypatch, target):
    """As many products an instruction as its vector holds numbers of the width that it multiplies, or twice those."""
    monkeypatch.setattr(targets, "TARGET", target)
    told = instructions()
    assert told["target"] == target.name
    assert (
        told["float16"]
        == told["float32"]
        == f"multiply-adds, {target.vector_bytes // 4} products an instruction"
    )
    bits = {"vdpbf16ps": 16, "vpdpbusd": 8, "vpmaddwd": 16, "vpmaddubsw": 8, "sdot": 8, "usmmla": 4}
    amx = {"bfloat16": "tdpbf16ps, 8192 products an instruction"} if target.has_amx else {}
    for dtype, step in {"bfloat16": target.bfloat16, "int8": target.int8, "int4": target.int4}.items():
        own = f"{step}, {target.vector_bytes * 8 // bits.get(step, 32)} products an instruction"
        assert told[dtype].removeprefix("tdpbsud, 16384; few rows: ") == amx.get(dtype, own)


def test_bandwidth_reads_every_byte_in_every_repetition(monkeypatch):
    read = []
    seconds = iter([0.0, 2.0, 2.0, 2.5, 2.5, 5.0])
    monkeypatch.setattr("numpy.bitwise_or", type("Or", (), {"reduce": staticmethod(read.append)}))
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: next(seconds))
    assert hardware.read_bandwidth(3, size=8000) == 8000 / 0.5
    assert len(read) == 9
    assert sum(share.nbytes for share in read) == 3 * 8000


@pytest.mark.parametrize(
    ("capability", "answer"),
    [
        ((7, 5), "in float32; a later GPU is needed for float16, bfloat16, int8"),
        ((8, 6), "in float32, float16, bfloat16, int8"),
    ],
)
def test_the_gpus_dtypes_are_told(monkeypatch, capsys, capability, answer):
    device = SimpleNamespace(capability=capability)
    monkeypatch.setattr("tinygpt.kernels.cuda.device.the_device", lambda: device)
    monkeypatch.setattr(hardware, "read_bandwidth", lambda threads: 1e9)
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu"]["kernels"] == f"they run here {answer}"


@pytest.mark.skipif(os.name == "nt", reason="the tool's stand-in is a shell script")
@pytest.mark.parametrize(
    ("script", "told"),
    rows("""
echo A, 580.65; echo B C, 580.65 | {"driver": "580.65", "devices": ["A", "B C"]}
echo NVIDIA-SMI has failed; exit 9 | {"driver": null, "devices": []}
null | {"driver": null, "devices": []}
"""),
    ids=["two", "failed", "absent"],
)
def test_the_drivers_own_tool_names_the_gpus(monkeypatch, tmp_path, script, told):
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        (tool := tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    assert driver() == told


def test_the_command_as_users_run_it():
    environment = os.environ | {"OMP_NUM_THREADS": "7"}
    result = run_process("doctor", "--threads", "1", env=environment, text=True, check=True)
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "OMP_NUM_THREADS 7" in lines
    assert "tinygpt: measuring the memory's bandwidth\n" in result.stderr
    assert any(line.startswith("read_bandwidth ") and line.endswith(" GB/s") for line in lines)
    assert {"versions", "cpu", "kernels", "blas", "cache", "gpu"} <= set(lines)
