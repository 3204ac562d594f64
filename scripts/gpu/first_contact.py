"""Whether a GPU does what the CUDA kernels rely on, and how fast: to be run before anything else is, in minutes.

    python scripts/gpu/first_contact.py                        # everything, as JSON lines as it comes
    python scripts/gpu/first_contact.py --items versions mma   # some of it

Each item is checked before it is timed, and runs in a process of its own with a time limit: after an error on the GPU
no process can go on. Times are medians, of the host's clock around work that the GPU has finished.
"""

import argparse
import json
import os
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

SECONDS = 60  # for an item; its kernels are compiled in that time
SECONDS_OF_LARGE = {"decode 355M": 120, "decode 774M": 180, "decode 1.5B": 300}  # weights are drawn, twice
REPEATS = 30
# Of logits, the relative error in all. Wide enough for 48 layers, as one in bfloat16 is off by 3e-3 in the simulator;
# what is computed wrongly is off by about 1.
LIMITS = {"float32": 1e-5, "bfloat16": 5e-2, "int8": 1e-1}
STEPS = 16  # decode steps that the engine takes at once


class WrongResult(Exception):
    """What came is not what should have come. The message says how far off it is."""


def versions() -> dict[str, Any]:
    device = the_device()  # first: without numba-cuda it says so, and the imports below only that a module is absent
    from cuda.bindings import driver, nvjitlink
    from numba import cuda

    from tinygpt.kernels.cuda.runtime.jit import release_of_libnvvm

    found = {name: metadata.version(name) for name in ("numpy", "numba", "numba-cuda", "cuda-bindings", "cuda-core")}
    releases = {"libNVVM": release_of_libnvvm(), "nvJitLink": nvjitlink.version()}
    return {
        "GPU": cuda.get_current_device().name.decode(),
        "compute capability": cuda.get_current_device().compute_capability,
        "multiprocessors": device.multiprocessors,
        "free GiB": round(device.free_bytes() / 2**30, 1),
        "driver's CUDA": driver.cuDriverGetVersion()[1],
        **found,
        **{name: ".".join(map(str, release)) for name, release in releases.items()},
    }


def mma(device: Any) -> dict[str, Any]:
    """A product by mma.sync, its operands by cp.async."""
    from scripts.gpu import probes
    from tinygpt.kernels.cuda.packing.dtypes import to_bfloat16

    generator = np.random.default_rng(0)
    a, b = (generator.integers(-8, 9, (rows, 32)).astype(np.float32) for rows in (16, 8))
    out = device.array(np.full(128, np.nan, np.float32))
    device.launch(probes.multiply, 1, 32, out, *(device.array(to_bfloat16(values).ravel()) for values in (a, b)))
    need_equal(device.read(out).reshape(16, 8), a @ b.T)
    return {}


def grant(device: Any, kib: int = 100) -> dict[str, Any]:
    """More shared memory than a launch has without being granted it."""
    from scripts.gpu import probes

    values = np.arange(kib << 8, dtype=np.float32)
    out = device.array(values * np.float32(np.nan))
    device.launch(probes.reverse, 1, 256, out, device.array(values), values.size, shared_bytes=values.nbytes)
    need_equal(device.read(out), values[::-1])
    return {"KiB": kib}


def capture(device: Any, nodes: int = 3) -> dict[str, Any]:
    """A graph of a few kernels, each of which goes on with what the one before has left."""
    from scripts.gpu import probes

    seconds_of_nodes(device, probes.count_up_early, nodes, blocks=2, threads=32)
    return {"nodes": nodes}


def graph(device: Any, nodes: int = 1000, blocks: int = 132, threads: int = 256) -> dict[str, Any]:
    """Kernels that do next to nothing, one after another in a graph: what a kernel costs, and one that begins early."""
    from scripts.gpu import probes

    kinds = {"us a node": probes.count_up, "us a node that begins early": probes.count_up_early}
    seconds = {kind: seconds_of_nodes(device, kernel, nodes, blocks, threads) for kind, kernel in kinds.items()}
    return {"nodes": nodes, "blocks": blocks, **{kind: round(1e6 * each / nodes, 3) for kind, each in seconds.items()}}


def seconds_of_nodes(device: Any, kernel: Any, nodes: int, blocks: int, threads: int) -> float:
    """Of a graph of a kernel of probes.py that counts up, again and again."""
    counts = device.zeros((blocks,), np.int32)
    device.launch(kernel, blocks, threads, counts)  # compiled before the capture
    replay = device.capture(lambda: [device.launch(kernel, blocks, threads, counts) for _ in range(nodes)])
    need_equal(device.read(counts), np.ones(blocks, np.int32))  # a capture runs nothing
    seconds, runs = median_seconds(device, replay)
    need_equal(device.read(counts), np.full(blocks, 1 + runs * nodes, np.int32))
    return seconds


def barrier(device: Any, times: int = 10_000) -> dict[str, Any]:
    """The persistent kernel's barrier, a block on each multiprocessor."""
    from scripts.gpu import probes
    from tinygpt.kernels.cuda.layers.linear import LINEAR_THREADS
    from tinygpt.kernels.cuda.persistent.kernel import MAX_SPINS

    blocks = device.multiprocessors
    arrivals, failed, met = (device.zeros((size,), np.int32) for size in (1, 1, blocks))

    def run() -> None:
        device.write(arrivals, np.zeros(1, np.int32))
        arguments = arrivals, failed, met, MAX_SPINS, times
        device.launch(probes.meet, blocks, LINEAR_THREADS, *arguments, cooperative=True)

    seconds, _ = median_seconds(device, run, repeats=5)
    need_equal(device.read(failed), np.zeros(1, np.int32))
    need_equal(device.read(met), np.full(blocks, times, np.int32))
    return {"blocks": blocks, "us a barrier": round(1e6 * seconds / times, 3)}


def read(device: Any, kib: int = 512 << 10, loads: tuple[int, ...] = (1, 2, 4, 8)) -> dict[str, Any]:
    """Memory read 16 bytes at a time: GB/s by the KiB that each multiprocessor has under way."""
    from tinygpt.kernels.cuda.runtime.peak import PEAK_THREADS, read_kernel

    words = np.random.default_rng(0).integers(0, 1 << 32, kib << 8, np.uint32)
    on_device, found = device.array(words), {}
    for per_thread in loads:
        for blocks in (1, 2, 4):
            threads = blocks * device.multiprocessors * PEAK_THREADS
            rounds = words.size // (threads * per_thread * 4)
            count, out = rounds * threads * per_thread * 4, device.zeros((threads,), np.uint32)
            arguments = read_kernel(per_thread), blocks * device.multiprocessors, PEAK_THREADS
            seconds, _ = median_seconds(device, lambda: device.launch(*arguments, out, on_device, rounds), repeats=10)  # noqa: B023
            need_equal(np.bitwise_xor.reduce(device.read(out)), np.bitwise_xor.reduce(words[:count]))
            under_way = blocks * PEAK_THREADS * per_thread * 16 >> 10
            found[f"{per_thread} x {blocks}: {under_way} KiB"] = round(4 * count / seconds / 1e9)
    return {"MiB": kib >> 10, "GB/s by loads a thread x blocks": found}


def gemv(device: Any, weights: int = 50257 * 768, widths: tuple[int, ...] = (768, 1600, 3072)) -> dict[str, Any]:
    """One token's linear layer in bfloat16, more of it than the L2 cache holds: GB/s by its width."""
    from tinygpt.kernels.cuda.layers.linear import LINEAR_THREADS, LOGITS, Weights, linear_kernel
    from tinygpt.kernels.cuda.packing.dtypes import from_bfloat16, to_bfloat16
    from tinygpt.kernels.cuda.packing.layout import pack, panel_count, step_count
    from tinygpt.kernels.cuda.sizes import NUM_LOGITS, NUM_SIZES

    generator, found = np.random.default_rng(0), {}
    function, sizes = linear_kernel("bfloat16", 1, LOGITS), device.array(np.ones(NUM_SIZES, np.int32))
    for width in widths:
        features = weights // width
        matrix = generator.standard_normal((features, width), np.float32) / np.float32(np.sqrt(width))
        x, (panels, scales) = to_bfloat16(generator.standard_normal(width, np.float32)), pack(matrix, "bfloat16")
        arrays = map(device.array, (panels, scales, np.zeros(1, np.float32)))
        packed = Weights(*arrays, panel_count(features), step_count(width), features)
        out = device.array(np.full(features, np.nan, np.float32))
        arguments = out, device.array(x), packed, 0, features, sizes, NUM_LOGITS
        launch = partial(device.launch, function, packed.num_panels, LINEAR_THREADS, *arguments)
        seconds, _ = median_seconds(device, launch, repeats=10)
        need_near(device.read(out), from_bfloat16(to_bfloat16(matrix)) @ from_bfloat16(x), 1e-5)
        found[width] = round(panels.nbytes / seconds / 1e9)
    return {"GB/s by width": found}


def three_layers(device: Any, dtype: str) -> dict[str, Any]:
    """A small model: logits of a prompt, and greedy steps both ways."""
    from tinygpt.weights.config import ModelConfig
    from tinygpt.weights.random_checkpoint import random_checkpoint

    config = ModelConfig(n_layer=3, vocab_size=1000, n_positions=256)
    return decode(device, random_checkpoint("three layers", config), dtype)


def decode(device: Any, checkpoint: Any, dtype: str, prompt: int = 70, steps: int = STEPS) -> dict[str, Any]:
    """Logits of a prompt beside the reference's, then greedy steps of one sequence, by graphs and in one kernel.

    The same steps are timed again and again, as the engine takes them: with what the host does, and its wait for the
    tokens. The two ways must give the same tokens and leave the same bits.
    """
    from tinygpt.execution.batch import Batch
    from tinygpt.kernels import cuda, reference
    from tinygpt.kernels.cuda.decode_steps import DecodeSteps
    from tinygpt.kernels.cuda.multi_step import run_steps
    from tinygpt.kernels.cuda.persistent.kernel import can_persist, new_persistent, run_persistent
    from tinygpt.sampling.metadata import Warpers

    config = checkpoint.config
    token_ids = np.random.default_rng(0).integers(0, config.vocab_size, prompt).tolist()
    whole = Batch.of([token_ids], [0], [0], "all")
    oracle = reference.load_params(checkpoint)
    expected = reference.forward(oracle, whole, reference.new_kv_cache(config, 1, prompt))  # (prompt, V)
    del oracle

    params = cuda.load_params(checkpoint, dtype)
    kv_cache = cuda.new_kv_cache(config, 1, config.n_positions, "float32" if dtype == "float32" else "bfloat16")
    workspace = cuda.new_workspace(config, prompt, prompt, 1, dtype)
    logits = cuda.forward(params, whole, kv_cache, workspace).copy()
    error = need_near(logits, expected, LIMITS[dtype])

    batch, nothing = Batch.of([[int(logits[-1].argmax())]], [prompt], [0]), np.zeros(1, np.uint64)
    greedy = Warpers(*np.zeros((len(Warpers._fields), 1)))

    decoding = DecodeSteps(params, batch, kv_cache, workspace, greedy, nothing, nothing, steps)

    def by_graphs() -> np.ndarray:
        return np.stack(list(run_steps(decoding)))

    found = {"relative error of logits": error, "steps at once": steps, "context": prompt}
    tokens, x = by_graphs(), device.read(workspace.x[: config.n_embd])
    found["distinct tokens"] = len(set(tokens.ravel().tolist()))
    seconds, _ = median_seconds(device, by_graphs)
    found["ms a token by graphs"] = round(1e3 * seconds / steps, 4)
    if can_persist(params):
        state = new_persistent(params)

        def at_once() -> np.ndarray:
            return run_persistent(state, params, batch, kv_cache, workspace, steps)

        need_equal(at_once(), tokens)
        need_equal(device.read(workspace.x[: config.n_embd]), x)  # random weights may have one token follow another
        seconds, _ = median_seconds(device, at_once)
        found["ms a token in one kernel"] = round(1e3 * seconds / steps, 4)
        need_equal(at_once(), tokens)
    need_equal(by_graphs(), tokens)
    return found


def decode_shape(device: Any, shape: str) -> dict[str, Any]:
    from tinygpt.weights.random_checkpoint import open_random

    return decode(device, open_random(shape), "bfloat16")


def items() -> dict[str, Callable[[], dict[str, Any]]]:
    """In the order in which one needs to know them."""
    small = {
        f"three layers {dtype}": lambda dtype=dtype: three_layers(the_device(), dtype)
        for dtype in ("float32", "bfloat16", "int8")
    }
    shapes = ("124M", "355M", "774M", "1.5B")
    return {
        "versions": versions,
        "mma": lambda: mma(the_device()),
        "grant": lambda: grant(the_device()),
        "capture": lambda: capture(the_device()),
        "barrier": lambda: barrier(the_device()),
        "graph": lambda: graph(the_device()),
        "read": lambda: read(the_device()),
        "gemv": lambda: gemv(the_device()),
        **small,
        **{f"decode {shape}": lambda shape=shape: decode_shape(the_device(), shape) for shape in shapes},
    }


def the_device() -> Any:
    from tinygpt.kernels.cuda.runtime import device

    return device.the_device()


def median_seconds(device: Any, run: Callable[[], Any], repeats: int = REPEATS) -> tuple[float, int]:
    """Of `repeats` runs after two that warm up; and how often it ran in all."""
    found = []
    for _ in range(2 + repeats):
        device.synchronize()
        begin = time.perf_counter()
        run()
        device.synchronize()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[2:]), len(found)


def need_near(found: np.ndarray, expected: np.ndarray, limit: float) -> float:
    """The relative error in all; WrongResult if it is not below `limit`."""
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    if not error < limit:  # NaN is not
        raise WrongResult(f"numbers are off by {error:.2g} of what they should be, and {limit:.2g} is the most.")
    return error


def need_equal(found: np.ndarray, expected: np.ndarray) -> None:
    """WrongResult unless all numbers are the same."""
    if not np.array_equal(found, expected):
        wrong = np.flatnonzero(np.not_equal(found, expected))
        first = wrong[0]
        pair = f"{np.ravel(found)[first]} in place of {np.ravel(expected)[first]}"
        raise WrongResult(
            f"{wrong.size} of {np.size(expected)} numbers are wrong, the first, number {first}, is {pair}."
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", nargs="+", choices=items(), default=list(items()), help="default: all of them")
    parser.add_argument("--alone", choices=items(), help=argparse.SUPPRESS)  # one item, in this process
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(answer_of(items()[arguments.alone])), flush=True)
        return 0
    failed = 0
    for name in arguments.items:
        begin = time.time()
        answer = run_apart([sys.executable, __file__, "--alone", name], SECONDS_OF_LARGE.get(name, SECONDS))
        failed += "error" in answer
        print(json.dumps({"item": name, **answer, "seconds": round(time.time() - begin, 1)}), flush=True)
    return 1 if failed else 0


def answer_of(item: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return item()
    except Exception as error:  # this process is of no further use, and the next item has another
        traceback.print_exception(error)
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}


def run_apart(command: list[str], seconds: float) -> dict[str, Any]:
    """What a process prints as its last line, or the error that it came to."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds, env=os.environ, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"it was stopped after {seconds} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"error": f"its process ended with {done.returncode}, and stderr says why"}
    return json.loads(lines[-1])


if __name__ == "__main__":
    sys.exit(main())
