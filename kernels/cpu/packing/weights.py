"""Packing weights into panels: the kernel of each dtype, the arrays that it fills, and the threads that share it."""

import itertools
from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np

from ..jit import jit
from ..layers.formats import BFloat16Weight, Float32Weight, Int4Weight, Int8Weight
from ..layers.operands import from_bfloat16, to_bfloat16
from ..simd.grouped_tiles import SCALE_GROUP, WEIGHT_GROUP
from ..simd.panels import zeros
from ..simd.tiles import OUT_TILE
from ..simd.vector_ir import ROUNDING

LEVELS = np.float32(15)
NAN = np.uint16(0x7FC0)  # as bfloat16
PACK_SHARES = 16  # of a matrix
# Shares of a group's range that int4 tries: smaller steps, with clipping.
SHARES = np.array([1.0, 0.96, 0.92, 0.88, 0.84, 0.8], np.float32)


@jit
def pack_float32(weight, is_transposed, factors, panels, first, last):
    for p in range(first, last):
        _read_panel(weight, is_transposed, factors, p, panels[p])


@jit
def pack_bfloat16(weight, is_transposed, factors, panels, first, last):
    block = np.empty((panels.shape[1] * 2, OUT_TILE), np.float32)
    for p in range(first, last):
        _read_panel(weight, is_transposed, factors, p, block)
        for k in range(block.shape[0]):
            for j in range(OUT_TILE):
                panels[p, k // 2, j, k % 2] = to_bfloat16(block[k, j])


@jit
def pack_int8(weight, is_transposed, factors, panels, scales, first, last):
    block = np.empty((panels.shape[1] * 4, OUT_TILE), np.float32)
    largest = np.empty(OUT_TILE, np.float32)
    inverse = np.empty(OUT_TILE, np.float32)
    unfinite = np.empty(OUT_TILE, np.float32)
    for p in range(first, last):
        _read_panel(weight, is_transposed, factors, p, block)
        largest[:] = 0
        unfinite[:] = 0
        for k in range(block.shape[0]):
            for j in range(OUT_TILE):
                largest[j] = max(largest[j], abs(block[k, j]))
                unfinite[j] += block[k, j] * np.float32(0)
        for j in range(OUT_TILE):
            inverse[j] = np.float32(127) / largest[j] if largest[j] > 0 else np.float32(0)
            # A maximum ignores NaN; 0 * x is NaN if x is not finite.
            scales[p * OUT_TILE + j] = largest[j] / np.float32(127) + unfinite[j]
        for k in range(block.shape[0]):
            for j in range(OUT_TILE):
                nearest = (block[k, j] * inverse[j] + ROUNDING) - ROUNDING
                panels[p, k // 4, j, k % 4] = np.int32(nearest) + 128


@jit
def pack_int4(weight, is_transposed, factors, panels, group_scales, first, last):
    block = np.empty((panels.shape[1] * 8, OUT_TILE), np.float32)
    for p in range(first, last):
        _read_panel(weight, is_transposed, factors, p, block)
        panels[p] = 0
        for g in range(group_scales.shape[1]):
            group = block[g * WEIGHT_GROUP : (g + 1) * WEIGHT_GROUP]
            _choose_scales(group, group_scales[p, g])
            for i in range(WEIGHT_GROUP):
                step, byte = (g * WEIGHT_GROUP + i) // 4, i % 4
                for j in range(OUT_TILE):
                    scale = from_bfloat16(group_scales[p, g, 0, j])
                    offset = from_bfloat16(group_scales[p, g, 1, j])
                    level = np.int32(_level(group[i, j], scale, offset))
                    panels[p, step // 2, j, byte] |= np.uint8(level << (4 * (step % 2)))


@jit
def _level(x, scale, offset):
    nearest = ((x - offset) / scale + ROUNDING) - ROUNDING
    return min(max(nearest, np.float32(0)), LEVELS)


@jit
def _choose_scales(group, group_scales):
    """Find each column's bfloat16 scale and offset of least squared error; group (WEIGHT_GROUP, OUT_TILE)."""
    low = np.zeros(OUT_TILE, np.float32)
    high = np.zeros(OUT_TILE, np.float32)  # 0 is always in range
    least = np.full(OUT_TILE, np.inf, np.float32)
    error = np.empty(OUT_TILE, np.float32)
    scale = np.empty(OUT_TILE, np.float32)
    offset = np.empty(OUT_TILE, np.float32)
    for i in range(WEIGHT_GROUP):
        for j in range(OUT_TILE):
            low[j], high[j] = min(low[j], group[i, j]), max(high[j], group[i, j])
    group_scales[0] = NAN  # stays if no error is finite
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


@jit
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


def panel_count(columns: int) -> int:
    return -(-columns // OUT_TILE)


FORMATS = {
    "float32": (Float32Weight, pack_float32),
    "bfloat16": (BFloat16Weight, pack_bfloat16),
    "int8": (Int8Weight, pack_int8),
    "int4": (Int4Weight, pack_int4),
}
DTYPES = tuple(FORMATS)
K_UNIT = {"float32": 1, "bfloat16": 2, "int8": SCALE_GROUP, "int4": SCALE_GROUP}  # the unit of segments of K


def head_dtype_of(dtype: str) -> str:
    """Return the dtype of wte and the head, which need more than four bits."""
    return "int8" if dtype == "int4" else dtype


def pack_layers(
    checkpoint,
    names,
    dtype: str,
    packers: Executor,
    factors_of: Callable | None = None,
    keep: Callable | None = None,
) -> tuple[tuple, np.ndarray]:
    """Pack weights (N, K). Return their record and factors (L, K). keep(weight) cuts a layer."""
    n, k = checkpoint.tensor(names[0]).shape
    record, pack = FORMATS[dtype]
    arrays = new_weight(dtype, 1 if keep else len(names), n, k)
    kept = None
    all_factors = np.ones((len(names), k), np.float32)
    bounds = [i * panel_count(n) // PACK_SHARES for i in range(PACK_SHARES + 1)]
    for layer, name in enumerate(names):
        weight = checkpoint.tensor(name)  # (N, K)
        if factors_of is not None:
            all_factors[layer] = factors_of(layer, weight)
        is_transposed = not weight.flags.c_contiguous
        source = np.ascontiguousarray(weight.T if is_transposed else weight)
        places = [array[0 if keep else layer] for array in arrays]
        given = source, is_transposed, all_factors[layer], *places
        for share in [packers.submit(pack, *given, *pair) for pair in itertools.pairwise(bounds)]:
            share.result()
        checkpoint.release(name)
        if keep:
            piece = keep(record(*arrays))
            kept = kept or [zeros((len(names), *array.shape[1:]), array.dtype) for array in piece]
            for target, array in zip(kept, piece, strict=True):
                target[layer] = array[0]
    return record(*(kept or arrays)), all_factors


def new_weight(dtype: str, layers: int, n: int, k: int) -> tuple[np.ndarray, ...]:
    return tuple(zeros(shape, array_dtype) for shape, array_dtype in weight_layout(dtype, layers, n, k))


def weight_layout(dtype: str, layers: int, n: int, k: int) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
    """Return shape and dtype of each array of a record, for weights (N, K)."""
    p, groups = panel_count(n), -(-k // SCALE_GROUP)
    if dtype == "float32":
        return (((layers, p, k, OUT_TILE), np.dtype(np.float32)),)
    if dtype == "bfloat16":
        return (((layers, p, -(-k // 2), OUT_TILE, 2), np.dtype(np.uint16)),)
    if dtype == "int8":
        panels = (layers, p, groups * SCALE_GROUP // 4, OUT_TILE, 4)
        return (panels, np.dtype(np.uint8)), ((layers, p * OUT_TILE), np.dtype(np.float32))
    panels = (layers, p, groups * SCALE_GROUP // 8, OUT_TILE, 4)
    scales = (layers, p, groups * SCALE_GROUP // WEIGHT_GROUP, 2, OUT_TILE)
    return (panels, np.dtype(np.uint8)), (scales, np.dtype(np.uint16))
