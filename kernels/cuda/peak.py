"""Peak rates of this GPU: bytes read a second, and products."""

import functools

import numpy as np
from numba import cuda, float32, int32, uint32

from . import device as devices
from .jit import BF16, four, kernel, load_weights

PEAK_THREADS = 256
READ_BYTES = 1 << 30  # far more than the L2 cache
LOADS, READ_BLOCKS = 4, 4  # of 16 bytes under way in a thread, and blocks of a multiprocessor
CHAINS, MULTIPLY_BLOCKS = 8, 2  # sums of a warp that do not wait for one another
ROUNDS = 20_000  # a run is some milliseconds
PRODUCTS = {"bfloat16": 16 * 8 * 16, "float32": 32}  # of a warp in one instruction
REPETITIONS = 5


def read_bandwidth(size: int = READ_BYTES) -> float:
    """Return the bytes a second of a read of `size` bytes."""
    device = devices.the_device()
    blocks = READ_BLOCKS * device.multiprocessors
    threads = blocks * PEAK_THREADS
    rounds = max(size // (16 * LOADS * threads), 1)
    words = device.zeros((rounds * LOADS * 4 * threads,), np.uint32)
    out = device.zeros((threads,), np.uint32)
    seconds = _best_seconds(
        lambda: device.launch(read_kernel(LOADS), blocks, PEAK_THREADS, out, words, rounds)
    )
    return words.nbytes / seconds


def tile_rate(kind: str, rounds: int = ROUNDS) -> float:
    """Return operations a second: "bfloat16" by mma.sync, "float32" on ordinary units."""
    device = devices.the_device()
    blocks = MULTIPLY_BLOCKS * device.multiprocessors
    out = device.zeros((blocks * PEAK_THREADS,), np.float32)
    seconds = _best_seconds(lambda: device.launch(multiply_kernel(kind), blocks, PEAK_THREADS, out, rounds))
    return blocks * (PEAK_THREADS // 32) * rounds * CHAINS * 2 * PRODUCTS[kind] / seconds


def _best_seconds(run) -> float:
    device = devices.the_device()
    run()  # compiles
    marks = [device.mark()]
    for _ in range(REPETITIONS):
        run()
        marks.append(device.mark())
    return min(map(device.seconds, marks, marks[1:]))


@functools.cache
def read_kernel(loads: int):
    """Read rounds * loads * 4 words in each thread. out: their exclusive or."""
    held_words = 4 * loads

    def read(out, words, rounds):
        thread = cuda.blockIdx.x * PEAK_THREADS + cuda.threadIdx.x
        threads = cuda.gridDim.x * PEAK_THREADS
        found = 0
        held = cuda.local.array(held_words, uint32)
        for turn in range(int32(0), rounds):
            for i in range(loads):
                loaded = load_weights(words, ((turn * loads + i) * threads + thread) * 4)
                for k in range(4):
                    held[4 * i + k] = loaded[k]
            for i in range(held_words):
                found ^= held[i]
        out[thread] = found

    return kernel(read)


@functools.cache
def multiply_kernel(kind: str):
    is_bfloat16 = kind == "bfloat16"
    mma = BF16.mma
    sums_size = CHAINS * 4

    def multiply(out, rounds):
        thread = cuda.blockIdx.x * PEAK_THREADS + cuda.threadIdx.x
        sums = cuda.local.array(sums_size, float32)
        total = float32(0)
        word = uint32(thread)
        factor = float32(1) / float32(thread + 2)
        for i in range(sums_size):
            sums[i] = factor
        for _ in range(int32(0), rounds):
            for chain in range(CHAINS):
                if is_bfloat16:
                    c = mma((word, word, word, word), (word, word), four(sums, chain * 4))
                    for k in range(4):
                        sums[chain * 4 + k] = c[k]
                else:
                    sums[chain] = cuda.fma(sums[chain], factor, factor)
        for i in range(sums_size):
            total += sums[i]
        out[thread] = total

    return kernel(multiply)
