"""The rate of the tiles with all operands in the caches: the bound of prefill."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.simd.grouped_tiles import (
    EXPANSION,
    GROUP_BYTES,
    OPERAND_BYTES,
    SCALE_GROUP,
    SCALES_BYTES,
    WEIGHT_GROUP,
    tile_int4,
    tile_int8,
)
from tinygpt.kernels.cpu.simd.panels import zeros
from tinygpt.kernels.cpu.simd.targets import TARGET
from tinygpt.kernels.cpu.simd.tiles import CHUNK_BYTES, LINE_BYTES, OUT_TILE, ROW_TILE, panel_add
from tinygpt.kernels.cpu.simd.vector_ir import address

# K of a tile: a chunk of a panel, which stays in the L1 cache.
K = {"float32": CHUNK_BYTES // (4 * OUT_TILE), "bfloat16": CHUNK_BYTES // (2 * OUT_TILE)}
K |= {dtype: CHUNK_BYTES // (size * EXPANSION[dtype]) * SCALE_GROUP for dtype, size in GROUP_BYTES.items()}
TILES = 20000  # a run is 0.05 s or so
# The types of A and B.
PLAIN = {
    "float32": (np.float32, np.float32),
    "bfloat16": (np.uint16 if TARGET.multiplies_bfloat16 else np.float32, np.uint16),
}


def tile_rate(kind: str, threads: int, repetitions: int = 3, tiles: int = TILES) -> float:
    """Return all threads' operations a second in a dtype's tiles; a product and a sum are two."""
    run = loop_plain if kind in PLAIN else loop_grouped
    arguments = [_arguments(kind, K[kind]) for _ in range(threads)]
    run(*arguments[0], 1)  # compiles
    with ThreadPoolExecutor(threads) as pool:
        seconds = min(_seconds(pool, lambda given: run(*given, tiles), arguments) for _ in range(repetitions))
    return threads * tiles * 2 * ROW_TILE * OUT_TILE * K[kind] / seconds


def _seconds(pool: ThreadPoolExecutor, run: Callable[[tuple], object], arguments: list[tuple]) -> float:
    start = time.perf_counter()
    list(pool.map(run, arguments))
    return time.perf_counter() - start


@jit
def loop_plain(a, b, c, times):
    lda, ldb, ahead = a.shape[1] * a.itemsize, OUT_TILE * 4, address(b)
    for _ in range(times):
        panel_add(
            b, ROW_TILE, address(a), lda, address(b), ldb, b.shape[0], address(c), OUT_TILE * 4, ahead, LINE_BYTES
        )


@jit
def loop_grouped(is_int4, a, scales, b, b_scales, c, times):
    lda, lds, x, s = a.shape[1] * a.itemsize, scales.shape[1] * SCALES_BYTES, address(a), address(scales)
    where = address(b), address(b_scales), scales.shape[1], address(c), address(b), LINE_BYTES
    for _ in range(times):
        if is_int4:
            tile_int4(ROW_TILE, x, lda, s, lds, *where)
        else:
            tile_int8(ROW_TILE, x, lda, s, lds, *where)


def _arguments(dtype: str, k: int) -> tuple:
    c = zeros((ROW_TILE, OUT_TILE))
    if dtype in PLAIN:
        left, kind = PLAIN[dtype]
        per_step = 4 // np.dtype(kind).itemsize
        return _aligned((ROW_TILE, k), left), _aligned((k // per_step, OUT_TILE, per_step), kind), c
    a = _aligned((ROW_TILE, k), np.dtype(f"i{OPERAND_BYTES[dtype]}"))
    scales = _aligned((ROW_TILE, k // SCALE_GROUP, 4), np.float32)
    b = _aligned((k // SCALE_GROUP * GROUP_BYTES[dtype] * EXPANSION[dtype],), np.uint8)
    return dtype == "int4", a, scales, b, _aligned((k // WEIGHT_GROUP, 2, OUT_TILE), np.uint16), c


def _aligned(shape: tuple[int, ...], kind: type) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    raw = np.random.default_rng(0).integers(0x3C, 0x40, size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(kind).reshape(shape)
