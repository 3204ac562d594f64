"""What becomes of a product's tile while it is in the L1 cache: segments, scales, bias, activation, residual, output.

A row of a tile is a panel, four vectors: as a loop over an array each of these steps would take longer to prepare than
to do, so they are vector IR.
"""

from numba import types

from tinygpt.kernels.cpu.jit import kernel
from tinygpt.kernels.cpu.layers.activations import NONE, activate
from tinygpt.kernels.cpu.layers.formats import Int8Weight
from tinygpt.kernels.cpu.layers.operands import put
from tinygpt.kernels.cpu.runtime.by_type import by_type
from tinygpt.kernels.cpu.simd.tiles import CHUNK_BYTES, LINE_BYTES, PANEL, PANEL_VECTORS, TILE_ROWS
from tinygpt.kernels.cpu.simd.vector_ir import (
    add,
    address,
    expect_write,
    float32_at,
    make_row_operation,
    multiply,
    second,
)

MAX_SEGMENTS = 4
# Rows of x that a thread takes on at a time: enough to use each panel well while it is in the L2 cache.
ROW_BLOCK = 8 * TILE_ROWS
SEGMENT_BYTES = ROW_BLOCK * PANEL * 4
# The scratch of a product, in float32 values: segments, a last panel's biases padded, a chunk that had to be expanded.
BIASES = MAX_SEGMENTS * ROW_BLOCK * PANEL
EXPANDED = BIASES + PANEL
SCRATCH = EXPANDED + CHUNK_BYTES // 4

add_row = make_row_operation(PANEL_VECTORS, add)
multiply_row = make_row_operation(PANEL_VECTORS, multiply)
copy_row = make_row_operation(PANEL_VECTORS, second)


@kernel
def finish_tile(out, tile, linears, layer, segments, activation, add, columns, scratch):
    """out[row + r, columns of the panel] = or += activation(sum of segments * scales + bias) * factors, for a tile's
    rows."""
    first, has_bias, has_factors = tile.panel * PANEL, linears.bias.size > 0, linears.factors.size > 0
    used = min(PANEL, columns - first)
    biases = address(linears.bias) + (layer * linears.bias.shape[1] + first) * 4
    if has_bias and used < PANEL:
        _copy_part(address(scratch) + BIASES * 4, biases, used)
        biases = address(scratch) + BIASES * 4
    for r in range(tile.rows):
        y = address(scratch) + r * PANEL * 4
        for s in range(segments.size - 1):
            scale_columns(linears.weight, y + s * SEGMENT_BYTES, layer, tile.panel)
        if segments.size == MAX_SEGMENTS + 1:  # (s0 + s1) + (s2 + s3)
            add_row(y, y + SEGMENT_BYTES)
            add_row(y + 2 * SEGMENT_BYTES, y + 3 * SEGMENT_BYTES)
            add_row(y, y + 2 * SEGMENT_BYTES)
        elif segments.size == 3:  # a rank's half of them
            add_row(y, y + SEGMENT_BYTES)
        if has_bias:
            add_row(y, biases)
        if activation != NONE:
            activate(float32_at(y, PANEL), activation)
        if has_factors:
            multiply_row(y, address(linears.factors) + (layer * linears.factors.shape[1] + first) * 4)
        emit(out, tile.row + r, first, y, used, add)


@kernel
def _copy_part(target, source, count):
    """Copy `count` float32 between addresses."""
    source, target = float32_at(source, count), float32_at(target, count)
    for i in range(count):
        target[i] = source[i]


def _scale_columns_int8(weight, y, layer, panel):
    multiply_row(y, address(weight.scales) + (layer * weight.scales.shape[1] + panel * PANEL) * 4)


def _leave_columns(weight, y, layer, panel):
    pass


# scale_columns(weight, y, layer, panel): multiply a panel's row, at the address y, by the scales of its columns where a
# weight has such.
scale_columns = by_type({Int8Weight: _scale_columns_int8}, otherwise=_leave_columns)


def _emit_float32(out, row, first, y, used, add):
    start = address(out) + (row * out.shape[1] + first) * 4
    if used < PANEL:
        values, target = float32_at(y, used), float32_at(start, used)
        for j in range(used):
            target[j] = target[j] + values[j] if add else values[j]
    elif add:
        add_row(start, y)
    else:
        copy_row(start, y)


def _emit_operand(out, row, first, y, used, add):
    put(out, row, first, float32_at(y, used))


# emit(out, row, first, y, used, add): put the `used` values at the address y into columns first to first + used of an
# array or an operand, or add them.
emit = by_type({types.float32: _emit_float32}, otherwise=_emit_operand)


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
