"""What becomes of a product's tile while it is in the L1 cache: segments, scales, bias, activation, residual, output.

A row of a tile is a panel, four vectors: as a loop over an array each of these steps would take longer to prepare than
to do, so they are vector IR.
"""

from numba.extending import overload

from tinygpt.kernels.cpu.jit import kernel
from tinygpt.kernels.cpu.layers.activations import NONE, activate
from tinygpt.kernels.cpu.layers.formats import Int8Weight, is_a
from tinygpt.kernels.cpu.layers.operands import put
from tinygpt.kernels.cpu.simd.tiles import PANEL, PANEL_VECTORS, TILE_ROWS
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
SEGMENT_BYTES = TILE_ROWS * PANEL * 4
BIASES = MAX_SEGMENTS * TILE_ROWS * PANEL  # where in the scratch a last panel's biases are padded
SCRATCH = BIASES + PANEL  # float32 values that one thread needs
LINE_BYTES = 64

add_row = make_row_operation(PANEL_VECTORS, add)
multiply_row = make_row_operation(PANEL_VECTORS, multiply)
copy_row = make_row_operation(PANEL_VECTORS, second)


@kernel
def finish_tile(rows, row, panel, out, weight, layer, bias, activation, add, segments, columns, scratch):
    """out[row + r, columns of the panel] = or += activation(sum of segments * scales + bias), for `rows` rows."""
    first = panel * PANEL
    used = min(PANEL, columns - first)
    biases = address(bias) + first * 4
    if bias.size and used < PANEL:
        biases = address(scratch) + BIASES * 4
        _copy_part(biases, address(bias) + first * 4, used)
    for r in range(rows):
        y = address(scratch) + r * PANEL * 4
        for s in range(segments.size - 1):
            scale_columns(y + s * SEGMENT_BYTES, weight, layer, panel)
        if segments.size == MAX_SEGMENTS + 1:  # (s0 + s1) + (s2 + s3)
            add_row(y, y + SEGMENT_BYTES)
            add_row(y + 2 * SEGMENT_BYTES, y + 3 * SEGMENT_BYTES)
            add_row(y, y + 2 * SEGMENT_BYTES)
        if bias.size:
            add_row(y, biases)
        if activation != NONE:
            activate(float32_at(y, PANEL), activation)
        emit(out, row + r, first, y, used, add)


@kernel
def _copy_part(target, source, count):
    """Copy `count` float32 between addresses."""
    source, target = float32_at(source, count), float32_at(target, count)
    for i in range(count):
        target[i] = source[i]


def scale_columns(y, weight, layer, panel):
    """Multiply a panel's row, at the address y, by the scales of its columns where a weight has such."""
    raise NotImplementedError


@overload(scale_columns)
def _scale_columns(y, weight, layer, panel):
    if is_a(weight, Int8Weight):
        return _scale_columns_int8
    return lambda y, weight, layer, panel: None


def _scale_columns_int8(y, weight, layer, panel):
    multiply_row(y, address(weight.scales) + (layer * weight.scales.shape[1] + panel * PANEL) * 4)


def emit(out, row, first, y, used, add):
    """Put the `used` values at the address y into columns first to first + used of an array or an operand, or add."""
    raise NotImplementedError


@overload(emit)
def _emit(out, row, first, y, used, add):
    if hasattr(out, "instance_class"):
        return lambda out, row, first, y, used, add: put(out, row, first, float32_at(y, used))
    return _emit_float32


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


def expect_tile(out, rows, row, panel):
    """Have the lines fetched that a tile will be written to: a store that misses the caches holds up those after it."""
    raise NotImplementedError


@overload(expect_tile)
def _expect_tile(out, rows, row, panel):
    if hasattr(out, "instance_class"):
        return lambda out, rows, row, panel: _expect_rows(out.values, rows, row, panel)
    return lambda out, rows, row, panel: _expect_rows(out, rows, row, panel)


@kernel
def _expect_rows(out, rows, row, panel):
    start = address(out) + row * out.strides[0] + panel * PANEL * out.itemsize
    for r in range(rows):
        for byte in range(0, PANEL * out.itemsize, LINE_BYTES):
            expect_write(start + r * out.strides[0] + byte)
