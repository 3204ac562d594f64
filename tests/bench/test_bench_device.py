"""`tinygpt bench --device cuda` on a simulated GPU, whose clock counts kernels: its figures, and what it refuses."""

import json

import numpy as np
import pytest

from support.bench_records import LIMITS
from support.cuda_compile import compile_kernel
from support.tiny_checkpoint import write_one_layer
from tinygpt.bench import sweep
from tinygpt.bench.roofline import MachineLimits, measure_limits
from tinygpt.cli import main as cli
from tinygpt.kernels.backend import DeviceError
from tinygpt.kernels.cuda import device as devices
from tinygpt.kernels.cuda import peak

KERNELS_OF_A_STEP = 10  # embed; 2 norms, 4 linear layers and attention of a layer; the head and its norm
KERNELS_OF_A_DECODE_STEP = KERNELS_OF_A_STEP + 2  # one chooses a token, one goes on with it
CASES = "--prompt-lengths 4 --new-tokens 6 --batch-sizes 2 --repetitions 2"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_one_layer(tmp_path_factory.mktemp("model"), 40))


@pytest.mark.toolchain
@pytest.mark.slow
def test_passes_are_timed_by_the_gpus_clock(model, device, monkeypatch, capsys, tmp_path):
    """The kernels of a step take as many seconds, in each repetition, however slow this machine simulates them."""
    monkeypatch.setattr(
        sweep, "measure_limits", lambda dtype, threads, device: LIMITS if device == "cuda" else None
    )
    file = tmp_path / "records.json"
    command = f"bench --device cuda --model {model} --dtype float32 {CASES} --output {file}"
    assert cli.main(command.split()) == 0
    out, _ = capsys.readouterr()
    reading, generation = json.loads(file.read_text(encoding="utf-8"))
    for record in (reading, generation):
        assert (record["gpu_info"], record["backends"], record["n_gpu_layers"]) == (
            "a simulated GPU",
            "CUDA",
            1,
        )
        assert len(set(record["samples_ts"])) == 1
    assert reading["samples_ts"][0] == pytest.approx(2 * 4 / KERNELS_OF_A_STEP)
    assert generation["ms_per_token"] == pytest.approx(1e3 * KERNELS_OF_A_DECODE_STEP)
    assert "a simulated GPU, build" in out
    assert "on the GPU" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--dtype int4",
            "dtype is 'int4' and device 'cuda' computes in 'float32', 'float16', 'bfloat16', 'int8' only",
        ),
        ("--random tiny --kv-cache-dtype int8", "is 'int8' and must be one of 'auto', 'float32' for"),
    ],
)
def test_what_a_gpu_is_not_for_is_refused(flags, message, device, capsys):
    assert cli.main(["bench", "--device", "cuda", *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_ranks_have_no_published_studies(monkeypatch, capsys):
    monkeypatch.setattr(cli, "start_ranks", lambda args, words: None)  # this is one of them
    study = ["--preset", "batching-notebook"]
    assert cli.main(["bench", "--device", "cuda", "--tensor-parallel", "2", *study]) == 2
    assert "are for cases alone." in capsys.readouterr().err


@pytest.mark.parametrize("more", ["", "--preset batching-notebook"])
def test_no_gpu_is_one_sentence(more, monkeypatch, capsys):
    def absent():
        raise DeviceError("CUDA finds no GPU.")

    monkeypatch.setattr(devices, "the_device", absent)
    assert cli.main(["bench", "--device", "cuda", "--random", "tiny", *more.split()]) == 2
    err = capsys.readouterr().err
    assert "device is 'cuda' and cannot be used: CUDA finds no GPU. Or use device 'cpu'." in err
    assert "Traceback" not in err


@pytest.mark.toolchain
@pytest.mark.slow
def test_the_gpus_limits_are_counted(device, monkeypatch):
    """By a clock on which each launch is a second."""
    monkeypatch.setattr(peak, "REPETITIONS", 1)
    threads = peak.READ_BLOCKS * device.multiprocessors * peak.PEAK_THREADS
    assert peak.read_bandwidth(1) == threads * 16 * peak.LOADS
    warps = peak.MULTIPLY_BLOCKS * device.multiprocessors * peak.PEAK_THREADS // 32
    assert peak.tile_rate("bfloat16", 3) == warps * 3 * peak.CHAINS * 2 * 16 * 8 * 16
    assert peak.tile_rate("float32", 3) == warps * 3 * peak.CHAINS * 2 * 32


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "bfloat16")]
)
def test_limits_are_of_what_multiplies_on_a_gpu(dtype, kind, monkeypatch):
    monkeypatch.setattr(peak, "read_bandwidth", lambda: 7.0)
    monkeypatch.setattr(peak, "tile_rate", {"float32": 1.0, "bfloat16": 2.0}.get)
    assert measure_limits(dtype, 1, "cuda") == MachineLimits(
        7.0, {kind: {"float32": 1.0, "bfloat16": 2.0}[kind]}
    )


@pytest.mark.toolchain
def test_nothing_of_the_limits_is_left_out_by_the_compiler():
    """Products that nobody wants would not be made, and sums of one chain would wait for one another."""
    words = np.zeros(8, np.uint32)
    floats = np.zeros(8, np.float32)
    compiled = compile_kernel(peak.multiply_kernel("bfloat16"), floats, 1)
    assert compiled.ptx.count("mma.sync") % peak.CHAINS == 0
    assert compiled.ptx.count("mma.sync") > 0
    assert compiled.spilled == compiled.stack == 0
    assert compile_kernel(peak.multiply_kernel("float32"), floats, 1).ptx.count("fma.rn.f32") >= peak.CHAINS
    reading = compile_kernel(peak.read_kernel(peak.LOADS), words, words, 1)
    assert reading.ptx.count("ld.global.L1::no_allocate") >= peak.LOADS
    assert reading.spilled == reading.stack == 0
