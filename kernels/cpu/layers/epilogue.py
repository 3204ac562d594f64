"""What becomes of a product's tile while it is in the L1 cache: segments, scales, bias, activation, residual, output.

What a row needs is done to it in one go, in registers, by vector IR: a loop over an array for each step would take
longer to prepare than to do.
"""

import numpy as np
from numba import types

from tinygpt.kernels.cpu.jit import kernel
from tinygpt.kernels.cpu.layers.activations import NONE, ONE, activate
from tinygpt.kernels.cpu.layers.formats import Int8Weight
from tinygpt.kernels.cpu.layers.operands import put, put_panel
from tinygpt.kernels.cpu.runtime.by_type import by_type
from tinygpt.kernels.cpu.simd.finished_rows import add_rows, put_rows, sum_2_segments, sum_4_segments
from tinygpt.kernels.cpu.simd.panels import ROW_BYTES
from tinygpt.kernels.cpu.simd.tiles import CHUNK_BYTES, IN_STRIPS, LINE_BYTES, PANEL, TILE_ROWS
from tinygpt.kernels.cpu.simd.vector_ir import address, expect_write, float32_at

MAX_SEGMENTS = 4
# Rows of x that a thread takes on at a time: enough to use each panel well while it is in the L2 cache. In strips each
# block expands the panel's chunks, and fetches them into L1: larger ones pay.
ROW_BLOCK = (16 if IN_STRIPS else 8) * TILE_ROWS
SEGMENT_BYTES = ROW_BLOCK * PANEL * 4
# The scratch of a product, in float32 values: segments; rows of 1, of -0 and of a last panel's biases, padded; a chunk
# that had to be expanded.
ONES = MAX_SEGMENTS * ROW_BLOCK * PANEL
NOTHINGS, BIASES = ONES + PANEL, ONES + 2 * PANEL
EXPANDED = BIASES + PANEL
SCRATCH = EXPANDED + CHUNK_BYTES // 4

NOTHING = np.float32(-0.0)  # x + 0 would make 0 of -0


@kernel
def finish_tile(out, tile, linears, layer, segments, activation, add, columns, scratch):
    """out[row + r, columns of the panel] = or += activation(sum of segments * scales + bias) * factors, for a tile's
    rows."""
    y, first = address(scratch), tile.panel * PANEL
    used, has_factors = min(PANEL, columns - first), linears.factors.size > 0
    ones, nothings = y + ONES * 4, y + NOTHINGS * 4
    float32_at(ones, PANEL)[:] = ONE
    float32_at(nothings, PANEL)[:] = NOTHING
    scales = scales_of(linears.weight, layer, tile.panel, ones)
    biases = _biases_of(linears.bias, layer, first, used, nothings, y + BIASES * 4)
    if segments.size > 2:
        if segments.size == 3:  # a rank's half of them
            sum_2_segments(y, SEGMENT_BYTES, tile.rows, scales)
        else:
            sum_4_segments(y, SEGMENT_BYTES, tile.rows, scales)
        scales = ones
    if activation != NONE or has_factors:
        put_rows(y, ROW_BYTES, y, tile.rows, scales, biases)
        if activation != NONE:
            activate(float32_at(y, tile.rows * PANEL), activation)
        factors = address(linears.factors) + (layer * linears.factors.shape[1] + first) * 4
        scales, biases = factors if has_factors else ones, nothings
    emit(out, tile, used, y, scales, biases, add)


def _own_scales(weight, layer, panel, ones):
    return address(weight.scales) + (layer * weight.scales.shape[1] + panel * PANEL) * 4


def _ones(weight, layer, panel, ones):
    return ones


# scales_of(weight, layer, panel, ones): where the scales of a panel's columns lie; `ones` where a weight has none.
scales_of = by_type({Int8Weight: _own_scales}, otherwise=_ones)


@kernel
def _biases_of(bias, layer, first, used, nothings, padded):
    """Where a panel's biases lie: in `bias` (L, N), or at `padded`, as a last panel's are too few; or `nothings`."""
    if bias.size == 0:
        return nothings
    biases = address(bias) + (layer * bias.shape[1] + first) * 4
    if used == PANEL:
        return biases
    source, target = float32_at(biases, used), float32_at(padded, PANEL)
    target[:] = NOTHING
    for j in range(used):
        target[j] = source[j]
    return padded


def _emit_array(out, tile, used, y, scales, biases, add):
    start, stride = address(out) + (tile.row * out.shape[1] + tile.panel * PANEL) * 4, out.shape[1] * 4
    if used == PANEL:
        if add:
            add_rows(start, stride, y, tile.rows, scales, biases)
        else:
            put_rows(start, stride, y, tile.rows, scales, biases)
        return
    put_rows(y, ROW_BYTES, y, tile.rows, scales, biases)
    for r in range(tile.rows):
        values, target = float32_at(y + r * ROW_BYTES, used), float32_at(start + r * stride, used)
        for j in range(used):
            target[j] = target[j] + values[j] if add else values[j]


def _emit_operand(out, tile, used, y, scales, biases, add):
    if used == PANEL:
        put_panel(out, tile.row, tile.panel * PANEL, tile.rows, y, scales, biases)
        return
    put_rows(y, ROW_BYTES, y, tile.rows, scales, biases)
    for r in range(tile.rows):
        put(out, tile.row + r, tile.panel * PANEL, float32_at(y + r * ROW_BYTES, used))


# emit(out, tile, used, y, scales, biases, add): put y * scales + biases, of which `used` columns count, into the rows
# and columns of a tile in an array, or add it to them; or put it into an operand.
emit = by_type({types.float32: _emit_array}, otherwise=_emit_operand)


@kernel
def _expect_rows(out, tile):
    start = address(out) + tile.row * out.strides[0] + tile.panel * PANEL * out.itemsize
    for r in range(tile.rows):
        for byte in range(0, PANEL * out.itemsize, LINE_BYTES):
            expect_write(start + r * out.strides[0] + byte)


def _expect_array(out, tile):
    _expect_rows(out, tile)


def _expect_operand(out, tile):
    _expect_rows(out.values, tile)


# expect_tile(out, tile): have the lines fetched that a tile will be written to, as a store that misses the caches holds
# up those after it.
expect_tile = by_type({types.float32: _expect_array}, otherwise=_expect_operand)
