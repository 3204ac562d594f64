"""The peak rate of this CPU's tiles: the bound of prefill."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .dtypes import DTYPES, Tile, add_tile, new_weight
from .jit import jit
from .simd.tiles import CHUNK_BYTES, LINE_BYTES, OUT_TILE
from .simd.vector_ir import address, zeros

TILES = 20_000  # a run is 0.05 s or so


def tile_rate(kind: str, threads: int, repetitions: int = 3, tiles: int = TILES) -> float:
    """Return all threads' operations a second in a dtype's tiles, with all operands in the caches.

    A product and a sum are two.
    """
    unit = DTYPES[kind].unit
    arguments = [_arguments(kind, unit.rows, unit.of_chunk * unit.k) for _ in range(threads)]
    _repeat_tile(*arguments[0], unit.of_chunk, 1)  # compiles
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repetitions):
            start = time.perf_counter()
            list(pool.map(lambda operands: _repeat_tile(*operands, unit.of_chunk, tiles), arguments))
            seconds.append(time.perf_counter() - start)
    return threads * tiles * 2 * unit.rows * OUT_TILE * unit.of_chunk * unit.k / min(seconds)


@jit
def _repeat_tile(weight, x, b, c, units, times):
    tile = Tile(x.values.shape[0], 0, 0)
    for _ in range(times):
        add_tile(weight, x, tile, 0, 0, units, address(b), True, address(c), address(b), LINE_BYTES)


def _arguments(dtype: str, rows: int, k: int) -> tuple:
    """Return a weight and an operand of normal numbers, an expanded chunk, and sums."""
    weight = new_weight(dtype, 1, OUT_TILE, k)
    x = DTYPES[dtype].new_operand(rows, k)
    chunk = zeros((CHUNK_BYTES,), np.uint8)
    random = np.random.default_rng(0)
    for array in (*weight, *x, chunk):
        array.view(np.uint8)[...] = random.integers(0x3C, 0x40, array.view(np.uint8).shape, np.uint8)
    return weight, x, chunk, zeros((rows, OUT_TILE))
