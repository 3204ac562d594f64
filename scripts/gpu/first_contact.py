"""Check the CUDA kernels' assumptions on a GPU, and time a token: the first command to run, in minutes.

    python scripts/gpu/first_contact.py                        # everything, a JSON line for each item
    python scripts/gpu/first_contact.py --items versions mma   # some of it

Each item has a process with a time limit: after an error on the GPU a process cannot continue.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

# tinygpt is next to scripts/, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tinygpt import LLM, SamplingParams
from tinygpt.kernels.cuda import device as devices
from tinygpt.kernels.cuda.device import release_of_libnvvm
from tinygpt.kernels.cuda.jit import (
    BF16,
    commit_copies,
    copy_async,
    kernel,
    let_next_kernel_begin,
    load_shared,
    prefetch_run,
    shared_address,
    wait_for_copies,
    wait_for_kernel_before,
)
from tinygpt.kernels.numbers import to_bfloat16

from numba import cuda, float32, int32, uint32  # isort: skip

product = BF16.mma

SECONDS = 60  # of an item, with its compilation
# Random weights are drawn twice.
SECONDS_OF_LARGE = {
    "decode 355M": 120,
    "decode 774M": 180,
    "decode 1.5B": 300,
}
# Relative error of logits. 48 layers in bfloat16 are off by 3e-3, a wrong kernel by about 1.
LIMITS = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2, "int8": 1e-1}


@kernel
def multiply(out, a, b):
    """Compute out (16, 8) float32 = a (16, 32) @ b (8, 32).T of bfloat16 by one warp, as linear.py does."""
    lane, zero = int32(cuda.threadIdx.x), float32(0)
    g, q = lane // int32(4), lane % int32(4)
    address = shared_address(cuda.shared.array(24 * 16, float32, alignment=16))  # rows of 64 bytes
    prefetch_run(b, 0, 512)
    for i in range(2):
        copy_async(address + uint32(16 * (lane + 32 * i)), a, 8 * (lane + 32 * i))
    copy_async(address + uint32(1024 + 16 * lane), b, 8 * lane)
    commit_copies()
    wait_for_copies(0)
    cuda.syncthreads()
    upper = load_shared(address + uint32(64 * g + 16 * q))
    lower = load_shared(address + uint32(64 * (g + 8) + 16 * q))
    weights = load_shared(address + uint32(1024 + 64 * g + 16 * q))
    c = product((upper[0], lower[0], upper[1], lower[1]), (weights[0], weights[1]), (zero, zero, zero, zero))
    c = product((upper[2], lower[2], upper[3], lower[3]), (weights[2], weights[3]), c)
    out[g * 8 + 2 * q] = c[0]
    out[g * 8 + 2 * q + 1] = c[1]
    out[(g + 8) * 8 + 2 * q] = c[2]
    out[(g + 8) * 8 + 2 * q + 1] = c[3]


@kernel
def reverse(out, values, count):
    """Write the values in reverse order through dynamic shared memory, by one block."""
    memory = cuda.shared.array(0, float32, alignment=16)
    for i in range(int32(cuda.threadIdx.x), count, int32(cuda.blockDim.x)):
        memory[i] = values[i]
    cuda.syncthreads()
    for i in range(int32(cuda.threadIdx.x), count, int32(cuda.blockDim.x)):
        out[i] = memory[count - int32(1) - i]


@kernel
def count_up(counts):
    """Add 1 to the number of each block; blocks may start before the previous kernel ends."""
    let_next_kernel_begin()
    wait_for_kernel_before()
    if cuda.threadIdx.x == 0:
        counts[cuda.blockIdx.x] += int32(1)


def versions() -> dict[str, Any]:
    device = devices.the_device()  # first: its error says how to install numba-cuda
    from cuda.bindings import driver, nvjitlink

    return {
        "GPU": device.name,
        "compute capability": device.capability,
        "multiprocessors": device.multiprocessors,
        "free GiB": round(device.free_bytes() / 2**30, 1),
        "driver's CUDA": driver.cuDriverGetVersion()[1],
        **{
            name: metadata.version(name)
            for name in ("numpy", "numba", "numba-cuda", "cuda-bindings", "cuda-core")
        },
        "libNVVM": release_of_libnvvm(),
        "nvJitLink": nvjitlink.version(),
    }


def mma(device: Any) -> None:
    """Multiply by mma.sync, with operands loaded by cp.async."""
    generator = np.random.default_rng(0)
    a, b = (generator.integers(-8, 9, (rows, 32)).astype(np.float32) for rows in (16, 8))
    out = device.array(np.full(128, np.nan, np.float32))
    device.launch(multiply, 1, 32, out, *(device.array(to_bfloat16(values).ravel()) for values in (a, b)))
    np.testing.assert_equal(device.read(out).reshape(16, 8), a @ b.T)


def grant(device: Any, kib: int = 100) -> None:
    """Use more shared memory than the default of a launch."""
    values = np.arange(kib << 8, dtype=np.float32)
    out = device.array(values * np.float32(np.nan))
    device.launch(reverse, 1, 256, out, device.array(values), values.size, shared_bytes=values.nbytes)
    np.testing.assert_equal(device.read(out), values[::-1])


def graph(device: Any, nodes: int = 1000, blocks: int = 132, threads: int = 256) -> None:
    """Replay kernels, each of which may begin before its predecessor has ended."""
    counts = device.zeros((blocks,), np.int32)
    launch = partial(device.launch, count_up, blocks, threads, counts)
    launch()  # compiled before the capture
    replay = device.capture(lambda: [launch() for _ in range(nodes)])
    for replays in range(3):  # a capture runs nothing
        np.testing.assert_equal(device.read(counts), np.full(blocks, 1 + replays * nodes, np.int32))
        replay()


def decode(model: str, dtype: str, prompt: int = 70, steps: int = 64, repeats: int = 5) -> dict[str, Any]:
    """Compare logits with the reference's, and time greedy steps of one sequence, with the host's work."""
    sizes = {"max_num_seqs": 1, "prefix_cache_seqs": 0}
    with LLM(model, device="reference", **sizes) as reference:
        token_ids = np.random.default_rng(0).integers(0, reference.config.vocab_size, prompt).tolist()
        expected = reference.logits(token_ids)  # (prompt, V)
    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
    seconds = []
    texts = set()
    with LLM(model, dtype, device="cuda", **sizes) as llm:
        error = need_near(llm.logits(token_ids), expected, LIMITS[dtype])
        for _ in range(2 + repeats):
            (output,) = llm.generate([token_ids], params, use_tqdm=False)
            seconds.append((output.metrics.finished - output.metrics.first_token) / max(steps - 1, 1))
            texts.add(tuple(output.outputs[0].token_ids))
    assert len(texts) == 1, "the same prompt gave different tokens."
    ms = round(1e3 * statistics.median(seconds[2:]), 4)
    return {"relative error of logits": error, "context": prompt, "ms a token": ms}


def items() -> dict[str, Callable[[], dict[str, Any] | None]]:
    """Return the items; each relies on earlier items."""
    checks = {check.__name__: lambda f=check: f(devices.the_device()) for check in (mma, grant, graph)}
    small = {f"tiny {dtype}": partial(decode, "random:tiny", dtype) for dtype in LIMITS}
    shapes = ("124M", "355M", "774M", "1.5B")
    large = {f"decode {shape}": partial(decode, f"random:{shape}", "bfloat16") for shape in shapes}
    return {"versions": versions, **checks, **small, **large}


def need_near(found: np.ndarray, expected: np.ndarray, limit: float) -> float:
    """Return the relative error in the 2-norm, which must be below `limit` and no NaN."""
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    assert error < limit, f"the relative error is {error:.2g} and must be below {limit:.2g}."
    return error


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--items", nargs="+", choices=items(), default=list(items()), help="default: all of them"
    )
    parser.add_argument("--alone", choices=items(), help=argparse.SUPPRESS)  # one item, in this process
    arguments = parser.parse_args()
    if arguments.alone:
        try:
            answer = items()[arguments.alone]() or {}
        except Exception as error:  # the next item has another process
            traceback.print_exception(error)
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
        print(json.dumps(answer), flush=True)
        return 0
    has_failed = False
    for name in arguments.items:
        begin = time.time()
        answer = run_apart([sys.executable, __file__, "--alone", name], SECONDS_OF_LARGE.get(name, SECONDS))
        has_failed |= "error" in answer
        print(json.dumps({"item": name, **answer, "seconds": round(time.time() - begin, 1)}), flush=True)
    return int(has_failed)


def run_apart(command: list[str], seconds: float) -> dict[str, Any]:
    """Return the last line that a process prints, or its error."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {seconds} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"error": f"the process ended with {done.returncode}; see stderr"}
    return json.loads(lines[-1])


if __name__ == "__main__":
    sys.exit(main())
