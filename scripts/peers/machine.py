"""The machine's limits, measured beside the engines: how fast it reads memory, and how fast our tiles can multiply."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numba import njit

from tinygpt.bandwidth import read_bandwidth
from tinygpt.kernels.cpu.tiles import (
    GROUP,
    GROUPED_ROWS,
    PANEL,
    TILE_ROWS,
    WEIGHT_GROUP,
    panel_tile,
    panel_tile_bf16,
    panel_tile_int4,
    panel_tile_int8,
)
from tinygpt.kernels.cpu.vector_ir import address

K = {"float32": 768, "bfloat16": 1536, "int8": 3072, "int4": 6144}  # a panel is 192 KiB: in L2, not in L1
TILES = 2000  # a run is 0.05 s or so
KINDS = {"float32": ("float32",), "bfloat16": ("bfloat16",), "int8": ("int8",), "int4": ("int4", "int8")}


class Engine:
    def __init__(self, folder: Path, dtype: str, threads: int):
        self.threads, self.pool = threads, ThreadPoolExecutor(threads)
        self.kinds = KINDS[dtype]

    def limits(self) -> dict[str, float]:
        """Bytes a second of reading, "bandwidth", and operations a second of each kind of tile that the dtype uses."""
        return {"bandwidth": read_bandwidth(self.threads)} | {kind: self._tile_rate(kind) for kind in self.kinds}

    def _tile_rate(self, kind: str) -> float:
        run, rows, make_arguments = LOOPS[kind]
        arguments = [make_arguments(K[kind]) for _ in range(self.threads)]
        seconds = self._seconds(lambda i: run(*arguments[i], TILES))
        return self.threads * TILES * 2 * rows * PANEL * K[kind] / seconds

    def _seconds(self, run: Callable[[int], object]) -> float:
        """Of run(thread) in all threads together, at their best of three; the first also compiles."""
        return min(self._once(run) for _ in range(3))

    def _once(self, run: Callable[[int], object]) -> float:
        start = time.perf_counter()
        list(self.pool.map(run, range(self.threads)))
        return time.perf_counter() - start


@njit(nogil=True)
def loop_float32(a, b, c, times):
    for _ in range(times):
        panel_tile(TILE_ROWS, address(a), a.shape[1] * 4, address(b), PANEL * 4, b.shape[0], address(c), PANEL * 4)


@njit(nogil=True)
def loop_bfloat16(a, b, c, times):
    for _ in range(times):
        panel_tile_bf16(TILE_ROWS, address(a), a.shape[1] * 2, address(b), PANEL * 4, b.shape[0], address(c), PANEL * 4)


@njit(nogil=True)
def loop_int8(a, scales, b, b_scales, c, times):
    k, groups, x, s = a.shape[1], scales.shape[1], address(a), address(scales)
    for _ in range(times):
        panel_tile_int8(
            GROUPED_ROWS, x, k, s, groups * 16, address(b), address(b_scales), groups, address(c), PANEL * 4
        )


@njit(nogil=True)
def loop_int4(a, scales, b, b_scales, c, times):
    k, groups, x, s = a.shape[1], scales.shape[1], address(a), address(scales)
    for _ in range(times):
        panel_tile_int4(
            GROUPED_ROWS, x, k, s, groups * 16, address(b), address(b_scales), groups, address(c), PANEL * 4
        )


def plain_arguments(kind: type, per_step: int) -> Callable[[int], tuple]:
    def make(k: int) -> tuple:
        a, b = aligned((TILE_ROWS, k), kind), aligned((k // per_step, PANEL, per_step), kind)
        return a, b, aligned((TILE_ROWS, PANEL), np.float32)

    return make


def grouped_arguments(weights_per_byte: int) -> Callable[[int], tuple]:
    def make(k: int) -> tuple:
        a, scales = aligned((GROUPED_ROWS, k), np.int8), aligned((GROUPED_ROWS, k // GROUP, 4), np.float32)
        b = aligned((k // 4 // weights_per_byte, PANEL, 4), np.uint8)
        b_scales = aligned((k // WEIGHT_GROUP, 2, PANEL), np.uint16)
        return a, scales, b, b_scales, aligned((GROUPED_ROWS, PANEL), np.float32)

    return make


def aligned(shape: tuple[int, ...], kind: type) -> np.ndarray:
    """An array at the start of a cache line, of bytes that are ordinary numbers in every type: 0x3d3e3c3f is 0.046.
    Zeros would not do: they cost less power, and the clock goes by that."""
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    raw = np.random.default_rng(0).integers(0x3C, 0x40, size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(kind).reshape(shape)


LOOPS = {  # the loop, its rows, its arguments for a K
    "float32": (loop_float32, TILE_ROWS, plain_arguments(np.float32, 1)),
    "bfloat16": (loop_bfloat16, TILE_ROWS, plain_arguments(np.uint16, 2)),
    "int8": (loop_int8, GROUPED_ROWS, grouped_arguments(1)),
    "int4": (loop_int4, GROUPED_ROWS, grouped_arguments(2)),
}
