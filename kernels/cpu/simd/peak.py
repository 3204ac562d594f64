"""How fast the tiles can multiply on this machine, with all they read in the caches: what bounds reading a prompt."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.simd.grouped_tiles import (
    EXPANSION,
    GROUP,
    GROUP_BYTES,
    OPERAND_BYTES,
    SCALES_BYTES,
    WEIGHT_GROUP,
    tile_int4,
    tile_int8,
)
from tinygpt.kernels.cpu.simd.memory import zeros
from tinygpt.kernels.cpu.simd.targets import TARGET
from tinygpt.kernels.cpu.simd.tiles import CHUNK_BYTES, LINE_BYTES, PANEL, TILE_ROWS, panel_add
from tinygpt.kernels.cpu.simd.vector_ir import address

# What a tile is given at a time: a chunk of a panel, which stays in the L1 cache.
K = {"float32": CHUNK_BYTES // (4 * PANEL), "bfloat16": CHUNK_BYTES // (2 * PANEL)}
K |= {dtype: CHUNK_BYTES // (size * EXPANSION[dtype]) * GROUP for dtype, size in GROUP_BYTES.items()}
TILES = 20000  # a run is 0.05 s or so


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
    lda, ldb, ahead = a.shape[1] * a.itemsize, PANEL * 4, address(b)
    for _ in range(times):
        panel_add(b, TILE_ROWS, address(a), lda, address(b), ldb, b.shape[0], address(c), PANEL * 4, ahead, LINE_BYTES)


@jit
def loop_int8(a, scales, b, b_scales, c, times):
    lda, lds, x, s = a.shape[1] * a.itemsize, scales.shape[1] * SCALES_BYTES, address(a), address(scales)
    where = address(b), address(b_scales), scales.shape[1], address(c), address(b), LINE_BYTES
    for _ in range(times):
        tile_int8(TILE_ROWS, x, lda, s, lds, *where)


@jit
def loop_int4(a, scales, b, b_scales, c, times):
    lda, lds, x, s = a.shape[1] * a.itemsize, scales.shape[1] * SCALES_BYTES, address(a), address(scales)
    where = address(b), address(b_scales), scales.shape[1], address(c), address(b), LINE_BYTES
    for _ in range(times):
        tile_int4(TILE_ROWS, x, lda, s, lds, *where)


def _plain_arguments(kind: type, left: type) -> Callable[[int], tuple]:
    def make(k: int) -> tuple:
        per_step = 4 // np.dtype(kind).itemsize
        a, b = _aligned((TILE_ROWS, k), left), _aligned((k // per_step, PANEL, per_step), kind)
        return a, b, zeros((TILE_ROWS, PANEL))

    return make


def _grouped_arguments(dtype: str) -> Callable[[int], tuple]:
    def make(k: int) -> tuple:
        a = _aligned((TILE_ROWS, k), np.dtype(f"i{OPERAND_BYTES[dtype]}"))
        scales = _aligned((TILE_ROWS, k // GROUP, 4), np.float32)
        b = _aligned((k // GROUP * GROUP_BYTES[dtype] * EXPANSION[dtype],), np.uint8)
        return a, scales, b, _aligned((k // WEIGHT_GROUP, 2, PANEL), np.uint16), zeros((TILE_ROWS, PANEL))

    return make


def _aligned(shape: tuple[int, ...], kind: type) -> np.ndarray:
    """An array at the start of a cache line, of bytes that are ordinary numbers in every type: 0x3d3e3c3f is 0.046.
    Zeros would not do: they cost less power, and the clock goes by that."""
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    raw = np.random.default_rng(0).integers(0x3C, 0x40, size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(kind).reshape(shape)


LEFT = np.uint16 if TARGET.multiplies_bfloat16 else np.float32  # of a product of bfloat16
LOOPS = {  # the loop, its rows, its arguments for a K
    "float32": (loop_plain, TILE_ROWS, _plain_arguments(np.float32, np.float32)),
    "bfloat16": (loop_plain, TILE_ROWS, _plain_arguments(np.uint16, LEFT)),
    "int8": (loop_int8, TILE_ROWS, _grouped_arguments("int8")),
    "int4": (loop_int4, TILE_ROWS, _grouped_arguments("int4")),
}
