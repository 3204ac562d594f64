"""Packing weights into panels, rounded or quantized, and back: the kernels of each dtype."""

import numpy as np

from .. import numbers
from ..numbers import BFLOAT16_NAN, ROUNDING
from .jit import kernel
from .layers.operands import from_bfloat16, to_bfloat16
from .simd.products import to_float16
from .simd.tiles import OUT_TILE
from .simd.vector_ir import WEIGHT_GROUP

LEVELS = np.float32(15)
# Shares of a group's range that int4 tries: smaller steps, with clipping.
SHARES = np.array([1.0, 0.96, 0.92, 0.88, 0.84, 0.8], np.float32)


# Panels of weights times the factors of K: (weight, is_transposed, factors, work, *a layer's arrays, first, last).
# work (WORK_ROWS + K, OUT_TILE) float32: rows of numbers by column, and a panel in float32.
WORK_ROWS = 6


@kernel
def pack_float32(weight, is_transposed, factors, work, panels, first, last):
    for p in range(first, last):
        _read_panel(weight, is_transposed, factors, p, panels[p])


@kernel
def pack_float16(weight, is_transposed, factors, work, panels, first, last):
    block = work[WORK_ROWS:]
    for p in range(first, last):
        _read_panel(weight, is_transposed, factors, p, block)
        for k in range(block.shape[0]):
            for j in range(OUT_TILE):
                panels[p, k, j] = to_float16(block[k, j])


@kernel
def pack_bfloat16(weight, is_transposed, factors, work, panels, first, last):
    block = work[WORK_ROWS:]
    for p in range(first, last):
        _read_panel(weight, is_transposed, factors, p, block)
        for k in range(block.shape[0]):
            for j in range(OUT_TILE):
                panels[p, k // 2, j, k % 2] = to_bfloat16(block[k, j])


@kernel
def pack_int8(weight, is_transposed, factors, work, panels, scales, first, last):
    block = work[WORK_ROWS:]
    largest, inverse, unfinite = work[0], work[1], work[2]
    for p in range(first, last):
        _read_panel(weight, is_transposed, factors, p, block)
        largest[:] = 0
        unfinite[:] = 0
        for k in range(block.shape[0]):
            for j in range(OUT_TILE):
                largest[j] = max(largest[j], abs(block[k, j]))
                unfinite[j] += block[k, j] * np.float32(0)
        for j in range(OUT_TILE):
            inverse[j] = numbers.LEVELS / largest[j] if largest[j] > 0 else np.float32(0)
            # A maximum ignores NaN; 0 * x is NaN if x is not finite.
            scales[p * OUT_TILE + j] = largest[j] / numbers.LEVELS + unfinite[j]
        for k in range(block.shape[0]):
            for j in range(OUT_TILE):
                nearest = (block[k, j] * inverse[j] + ROUNDING) - ROUNDING
                panels[p, k // 4, j, k % 4] = np.int32(nearest) + 128


@kernel
def pack_int4(weight, is_transposed, factors, work, panels, group_scales, first, last):
    block = work[WORK_ROWS:]
    for p in range(first, last):
        _read_panel(weight, is_transposed, factors, p, block)
        panels[p] = 0
        for g in range(group_scales.shape[1]):
            group = block[g * WEIGHT_GROUP : (g + 1) * WEIGHT_GROUP]
            _choose_scales(group, work, group_scales[p, g])
            for i in range(WEIGHT_GROUP):
                step, byte = (g * WEIGHT_GROUP + i) // 4, i % 4
                for j in range(OUT_TILE):
                    scale = from_bfloat16(group_scales[p, g, 0, j])
                    offset = from_bfloat16(group_scales[p, g, 1, j])
                    level = np.int32(_level(group[i, j], scale, offset))
                    panels[p, step // 2, j, byte] |= np.uint8(level << (4 * (step % 2)))


@kernel
def _level(x, scale, offset):
    nearest = ((x - offset) / scale + ROUNDING) - ROUNDING
    return min(max(nearest, np.float32(0)), LEVELS)


@kernel
def _choose_scales(group, work, group_scales):
    """Find each column's bfloat16 scale and offset of least squared error; group (WEIGHT_GROUP, OUT_TILE)."""
    low, high, least = work[0], work[1], work[2]
    error, scale, offset = work[3], work[4], work[5]
    low[:] = 0  # which is always in range
    high[:] = 0
    least[:] = np.inf
    for i in range(WEIGHT_GROUP):
        for j in range(OUT_TILE):
            low[j], high[j] = min(low[j], group[i, j]), max(high[j], group[i, j])
    group_scales[0] = BFLOAT16_NAN  # stays if no error is finite
    for share in SHARES:
        for j in range(OUT_TILE):
            step = (high[j] - low[j]) * share / LEVELS
            middle = (high[j] + low[j]) * np.float32(0.5)
            scale[j] = from_bfloat16(to_bfloat16(step)) if step > np.float32(1e-30) else np.float32(1)
            offset[j] = from_bfloat16(to_bfloat16(middle - np.float32(0.5) * LEVELS * step))
            error[j] = 0
        for i in range(WEIGHT_GROUP):
            for j in range(OUT_TILE):
                miss = _level(group[i, j], scale[j], offset[j]) * scale[j] + offset[j] - group[i, j]
                error[j] += miss * miss
        for j in range(OUT_TILE):
            if error[j] < least[j]:
                least[j] = error[j]
                group_scales[0, j], group_scales[1, j] = to_bfloat16(scale[j]), to_bfloat16(offset[j])


@kernel
def _read_panel(weight, is_transposed, factors, p, block):
    n, inputs = (weight.shape[1], weight.shape[0]) if is_transposed else weight.shape
    columns = min(OUT_TILE, n - p * OUT_TILE)
    for k in range(inputs):
        if is_transposed:
            for j in range(columns):
                block[k, j] = weight[k, p * OUT_TILE + j] * factors[k]
        else:
            for j in range(columns):
                block[k, j] = weight[p * OUT_TILE + j, k] * factors[k]
        for j in range(columns, OUT_TILE):
            block[k, j] = 0
    for k in range(inputs, block.shape[0]):
        for j in range(OUT_TILE):
            block[k, j] = 0


# Unpacking a layer's arrays to float32 (P, K, OUT_TILE).


def unpack_float32(panels: np.ndarray) -> np.ndarray:
    return panels


def unpack_float16(panels: np.ndarray) -> np.ndarray:
    return panels.view(np.float16).astype(np.float32)


def unpack_bfloat16(panels: np.ndarray) -> np.ndarray:
    return _in_order(numbers.from_bfloat16(panels))


def unpack_int8(panels: np.ndarray, scales: np.ndarray) -> np.ndarray:
    values = _in_order(panels.astype(np.float32) - 128)
    values *= scales.reshape(-1, 1, OUT_TILE)
    return values


def unpack_int4(panels: np.ndarray, group_scales: np.ndarray) -> np.ndarray:
    both = np.stack([panels & 15, panels >> 4], axis=2)  # (P, K / 8, 2, OUT_TILE, 4): two steps
    levels = _in_order(both.reshape(len(panels), -1, OUT_TILE, 4).astype(np.float32))
    groups = numbers.from_bfloat16(group_scales)  # (P, K / WEIGHT_GROUP, 2, OUT_TILE)
    scale, offset = (np.repeat(groups[:, :, i], WEIGHT_GROUP, axis=1) for i in (0, 1))  # (P, K, OUT_TILE)
    return levels * scale + offset


def _in_order(panels: np.ndarray) -> np.ndarray:
    """Return (P, K / U, OUT_TILE, U) as (P, K, OUT_TILE)."""
    return panels.transpose(0, 1, 3, 2).reshape(len(panels), -1, OUT_TILE)
