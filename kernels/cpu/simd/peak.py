"""How fast the tiles can multiply on this machine, with all they read in the caches: what bounds reading a prompt."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.simd.tiles import (
    GROUP,
    GROUPED_ROWS,
    PANEL,
    SCALES_BYTES,
    TILE_ROWS,
    WEIGHT_GROUP,
    panel_tile,
    panel_tile_int4,
    panel_tile_int8,
)
from tinygpt.kernels.cpu.simd.vector_ir import address

K = {"float32": 768, "bfloat16": 1536, "int8": 3072, "int4": 6144}  # a panel is 192 KiB: in L2, not in L1
TILES = 2000  # a run is 0.05 s or so


def tile_rate(kind: str, threads: int, repetitions: int = 3, tiles: int = TILES) -> float:
    """Operations a second of one dtype's tiles in all threads together, the best of some repetitions.

    A multiplication and an addition are two operations. int4 weights have a head in int8, whose tiles have their own
    rate.
    """
    run, rows, make_arguments = LOOPS[kind]
    arguments = [make_arguments(K[kind]) for _ in range(threads)]
    run(*arguments[0], 1)  # compiles
    with ThreadPoolExecutor(threads) as pool:
        seconds = min(_seconds(pool, lambda given: run(*given, tiles), arguments) for _ in range(repetitions))
    return threads * tiles * 2 * rows * PANEL * K[kind] / seconds


def _seconds(pool: ThreadPoolExecutor, run: Callable[[tuple], object], arguments: list[tuple]) -> float:
    start = time.perf_counter()
    list(pool.map(run, arguments))
    return time.perf_counter() - start


@jit
def loop_plain(a, b, c, times):
    lda = a.shape[1] * a.itemsize
    for _ in range(times):
        panel_tile(b, TILE_ROWS, address(a), lda, address(b), PANEL * 4, b.shape[0], address(c), PANEL * 4)


@jit
def loop_int8(a, scales, b, b_scales, c, times):
    k, groups, x, s = a.shape[1], scales.shape[1], address(a), address(scales)
    for _ in range(times):
        panel_tile_int8(
            GROUPED_ROWS, x, k, s, groups * SCALES_BYTES, address(b), address(b_scales), groups, address(c), PANEL * 4
        )


@jit
def loop_int4(a, scales, b, b_scales, c, times):
    k, groups, x, s = a.shape[1], scales.shape[1], address(a), address(scales)
    for _ in range(times):
        panel_tile_int4(
            GROUPED_ROWS, x, k, s, groups * SCALES_BYTES, address(b), address(b_scales), groups, address(c), PANEL * 4
        )


def _plain_arguments(kind: type, per_step: int) -> Callable[[int], tuple]:
    def make(k: int) -> tuple:
        a, b = _aligned((TILE_ROWS, k), kind), _aligned((k // per_step, PANEL, per_step), kind)
        return a, b, _aligned((TILE_ROWS, PANEL), np.float32)

    return make


def _grouped_arguments(weights_per_byte: int) -> Callable[[int], tuple]:
    def make(k: int) -> tuple:
        a, scales = _aligned((GROUPED_ROWS, k), np.int8), _aligned((GROUPED_ROWS, k // GROUP, 4), np.float32)
        b = _aligned((k // 4 // weights_per_byte, PANEL, 4), np.uint8)
        b_scales = _aligned((k // WEIGHT_GROUP, 2, PANEL), np.uint16)
        return a, scales, b, b_scales, _aligned((GROUPED_ROWS, PANEL), np.float32)

    return make


def _aligned(shape: tuple[int, ...], kind: type) -> np.ndarray:
    """An array at the start of a cache line, of bytes that are ordinary numbers in every type: 0x3d3e3c3f is 0.046.
    Zeros would not do: they cost less power, and the clock goes by that."""
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    raw = np.random.default_rng(0).integers(0x3C, 0x40, size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(kind).reshape(shape)


LOOPS = {  # the loop, its rows, its arguments for a K
    "float32": (loop_plain, TILE_ROWS, _plain_arguments(np.float32, 1)),
    "bfloat16": (loop_plain, TILE_ROWS, _plain_arguments(np.uint16, 2)),
    "int8": (loop_int8, GROUPED_ROWS, _grouped_arguments(1)),
    "int4": (loop_int4, GROUPED_ROWS, _grouped_arguments(2)),
}
