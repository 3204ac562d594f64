"""The epilogue of a product's tile in the L1 cache: segments, scales, bias, activation, residual, output."""

import numpy as np
from numba import types

from ..jit import kernel, overload_by_dtype
from ..simd.panels import ROW_BYTES, add_rows, put_rows, sum_2_segments, sum_4_segments
from ..simd.tiles import CHUNK_BYTES, IN_STRIPS, LINE_BYTES, OUT_TILE, ROW_TILE
from ..simd.vector_ir import address, expect_write, float32_at
from .activations import NONE, ONE, activate
from .formats import Int8Weight
from .operands import put, put_panel

MAX_SEGMENTS = 4
# Rows of x of an item, which share a panel in the L2 cache. In strips each block expands the panel's chunks anew.
ROW_BLOCK = (16 if IN_STRIPS else 8) * ROW_TILE
SEGMENT_BYTES = ROW_BLOCK * OUT_TILE * 4
# The scratch of a product, in float32: segments; rows of 1, of -0, of a last panel's biases; a chunk.
ONES = MAX_SEGMENTS * ROW_BLOCK * OUT_TILE
MINUS_ZEROS = ONES + OUT_TILE
BIASES = ONES + 2 * OUT_TILE
EXPANDED = BIASES + OUT_TILE
SCRATCH = EXPANDED + CHUNK_BYTES // 4

MINUS_ZERO = np.float32(-0.0)  # x + 0 would make 0 of -0


@kernel
def epilogue(out, tile, linears, layer, segments, activation, add, columns, scratch):
    """out[rows, columns of the panel] = or += activation(sum of segments * scales + bias) * factors."""
    y = address(scratch)
    first = tile.panel * OUT_TILE
    used = min(OUT_TILE, columns - first)
    has_factors = linears.factors.size > 0
    ones = y + ONES * 4
    minus_zeros = y + MINUS_ZEROS * 4
    float32_at(ones, OUT_TILE)[:] = ONE
    float32_at(minus_zeros, OUT_TILE)[:] = MINUS_ZERO
    scales = scales_of(linears.weight, layer, tile.panel, ones)
    biases = _biases_of(linears.bias, layer, first, used, minus_zeros, y + BIASES * 4)
    if segments.size > 2:
        if segments.size == 3:  # a rank's half of them
            sum_2_segments(y, SEGMENT_BYTES, tile.rows, scales)
        else:
            sum_4_segments(y, SEGMENT_BYTES, tile.rows, scales)
        scales = ones
    if activation != NONE or has_factors:
        put_rows(y, ROW_BYTES, y, tile.rows, scales, biases)
        if activation != NONE:
            activate(float32_at(y, tile.rows * OUT_TILE), activation)
        factors = address(linears.factors) + (layer * linears.factors.shape[1] + first) * 4
        scales = factors if has_factors else ones
        biases = minus_zeros
    store_tile(out, tile, used, y, scales, biases, add)


def _own_scales(weight, layer, panel, ones):
    return address(weight.scales) + (layer * weight.scales.shape[1] + panel * OUT_TILE) * 4


def _ones(weight, layer, panel, ones):
    return ones


# The address of the scales of a panel's columns.
scales_of = overload_by_dtype({Int8Weight: _own_scales}, otherwise=_ones)


@kernel
def _biases_of(bias, layer, first, used, minus_zeros, padded):
    if bias.size == 0:
        return minus_zeros
    biases = address(bias) + (layer * bias.shape[1] + first) * 4
    if used == OUT_TILE:
        return biases
    source = float32_at(biases, used)
    target = float32_at(padded, OUT_TILE)
    target[:] = MINUS_ZERO
    for j in range(used):
        target[j] = source[j]
    return padded


def _store_array(out, tile, used, y, scales, biases, add):
    start = address(out) + (tile.row * out.shape[1] + tile.panel * OUT_TILE) * 4
    stride = out.shape[1] * 4
    if used == OUT_TILE:
        if add:
            add_rows(start, stride, y, tile.rows, scales, biases)
        else:
            put_rows(start, stride, y, tile.rows, scales, biases)
        return
    put_rows(y, ROW_BYTES, y, tile.rows, scales, biases)
    for r in range(tile.rows):
        values = float32_at(y + r * ROW_BYTES, used)
        target = float32_at(start + r * stride, used)
        for j in range(used):
            target[j] = target[j] + values[j] if add else values[j]


def _store_operand(out, tile, used, y, scales, biases, add):
    if used == OUT_TILE:
        put_panel(out, tile.row, tile.panel * OUT_TILE, tile.rows, y, scales, biases)
        return
    put_rows(y, ROW_BYTES, y, tile.rows, scales, biases)
    for r in range(tile.rows):
        put(out, tile.row + r, tile.panel * OUT_TILE, float32_at(y + r * ROW_BYTES, used))


# store_tile stores or adds y * scales + biases, of which `used` columns count.
store_tile = overload_by_dtype({types.float32: _store_array}, otherwise=_store_operand)


@kernel
def _prefetch_rows(out, tile):
    start = address(out) + tile.row * out.strides[0] + tile.panel * OUT_TILE * out.itemsize
    for r in range(tile.rows):
        for byte in range(0, OUT_TILE * out.itemsize, LINE_BYTES):
            expect_write(start + r * out.strides[0] + byte)


def _prefetch_array(out, tile):
    _prefetch_rows(out, tile)


def _prefetch_operand(out, tile):
    _prefetch_rows(out.values, tile)


# A store that misses the caches delays later stores.
prefetch_tile = overload_by_dtype({types.float32: _prefetch_array}, otherwise=_prefetch_operand)
