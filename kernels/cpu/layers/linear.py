"""The matrix product: out = epilogue(x @ weight.T), over weights packed once into panels.

K may be cut into four segments, each accumulated apart and added as (s0 + s1) + (s2 + s3). That is the order in
which four tensor-parallel ranks would add them, so that one rank or four give the same bits.
"""

import numpy as np
from numba.extending import overload

from tinygpt.kernels.cpu.jit import kernel
from tinygpt.kernels.cpu.layers.epilogue import SEGMENT_BYTES, expect_tile, finish_tile
from tinygpt.kernels.cpu.layers.formats import BFloat16Weight, Float32Weight, Int4Weight, Int8Weight, is_a
from tinygpt.kernels.cpu.runtime.team import claim, complete, finish_phase
from tinygpt.kernels.cpu.simd.tiles import (
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
from tinygpt.kernels.cpu.simd.vector_ir import address

# Rows of x that a thread takes on at a time: enough to use each panel well while it is in the L2 cache.
ROW_BLOCK = 8 * TILE_ROWS
# What to do with the result. NumPy scalars: Numba would compile one more `linear` for each Python constant.
REPLACE, ADD = np.bool_(False), np.bool_(True)


@kernel
def linear(team, out, x, weight, layer, bias, activation, add, segments):
    """out = activation(x @ weight.T + bias), or out += that if `add`. A phase; an item is a panel and a row block.

    out (M, N) float32, x an operand of M rows, weight one of formats.py, bias (N,) or (0,) for none, segments: the
    bounds of the segments of K, (2,) or (5,) with no segment empty. Needs epilogue.SCRATCH values of scratch.
    """
    for_each_tile(team, out, x, weight, layer, bias, activation, add, segments, out.shape[0], out.shape[1])


@kernel
def linear_to_operand(team, out, x, weight, layer, bias, activation, segments, rows):
    """As `linear` without `add`, into rows of an operand: the next product's activations, converted tile by tile."""
    for_each_tile(team, out, x, weight, layer, bias, activation, REPLACE, segments, rows, bias.size)


@kernel
def for_each_tile(team, out, x, weight, layer, bias, activation, add, segments, rows, columns):
    height = tile_rows(weight)
    blocks = max((rows + ROW_BLOCK - 1) // ROW_BLOCK, 1)
    items = weight.panels.shape[1] * blocks
    item = claim(team, items)
    while item >= 0:
        panel, block = item // blocks, item % blocks
        stop = min((block + 1) * ROW_BLOCK, rows)
        for row in range(block * ROW_BLOCK, stop, height):
            count = min(height, stop - row)
            expect_tile(out, count, row, panel)
            products(count, row, panel, x, weight, layer, segments, team.scratch)
            finish_tile(count, row, panel, out, weight, layer, bias, activation, add, segments, columns, team.scratch)
        complete(team, items)
        item = claim(team, items)
    finish_phase(team)


def tile_rows(weight):
    """How many rows a tile of this weight takes."""
    raise NotImplementedError


@overload(tile_rows)
def _tile_rows(weight):
    if is_a(weight, Int8Weight) or is_a(weight, Int4Weight):
        return lambda weight: GROUPED_ROWS
    return lambda weight: TILE_ROWS


def products(rows, row, panel, x, weight, layer, segments, scratch):
    """scratch[segment, r, column] = the product over one segment of K, for a tile's rows; int8 columns unscaled."""
    raise NotImplementedError


@overload(products)
def _products(rows, row, panel, x, weight, layer, segments, scratch):
    for record, function in PRODUCTS.items():
        if is_a(weight, record):
            return function
    return None


def _products_float32(rows, row, panel, x, weight, layer, segments, scratch):
    lda = x.values.shape[1] * 4
    a = address(x.values) + row * lda
    b = panel_address(weight.panels, layer, panel)
    c = address(scratch)
    for s in range(segments.size - 1):
        start, steps = segments[s], segments[s + 1] - segments[s]
        c_segment = c + s * SEGMENT_BYTES
        panel_tile(rows, a + start * 4, lda, b + start * PANEL * 4, PANEL * 4, steps, c_segment, PANEL * 4)


def _products_bfloat16(rows, row, panel, x, weight, layer, segments, scratch):
    lda = x.values.shape[1] * 2
    a = address(x.values) + row * lda
    b = panel_address(weight.panels, layer, panel)
    c = address(scratch)
    for s in range(segments.size - 1):
        start, steps = segments[s] // 2, (segments[s + 1] + 1) // 2 - segments[s] // 2
        c_segment = c + s * SEGMENT_BYTES
        panel_tile_bf16(rows, a + start * 4, lda, b + start * PANEL * 4, PANEL * 4, steps, c_segment, PANEL * 4)


def _products_int8(rows, row, panel, x, weight, layer, segments, scratch):
    lda, lds = x.values.shape[1], x.scales.shape[1] * 16
    a, scales = address(x.values) + row * lda, address(x.scales) + row * lds
    b = panel_address(weight.panels, layer, panel)
    c = address(scratch)
    for s in range(segments.size - 1):
        start, stop = segments[s] // GROUP, (segments[s + 1] + GROUP - 1) // GROUP
        c_segment = c + s * SEGMENT_BYTES
        b_segment = b + start * GROUP * PANEL
        a_segment, s_segment = a + start * GROUP, scales + start * 16
        panel_tile_int8(rows, a_segment, lda, s_segment, lds, b_segment, b, stop - start, c_segment, PANEL * 4)


def _products_int4(rows, row, panel, x, weight, layer, segments, scratch):
    lda, lds = x.values.shape[1], x.scales.shape[1] * 16
    a, scales = address(x.values) + row * lda, address(x.scales) + row * lds
    b = panel_address(weight.panels, layer, panel)
    b_scales = panel_address(weight.group_scales, layer, panel)
    c = address(scratch)
    for s in range(segments.size - 1):
        start, stop = segments[s] // GROUP, (segments[s + 1] + GROUP - 1) // GROUP
        c_segment = c + s * SEGMENT_BYTES
        b_segment = b + start * GROUP * PANEL // 2
        g_segment = b_scales + start * (GROUP // WEIGHT_GROUP) * 2 * PANEL * 2
        a_segment, s_segment = a + start * GROUP, scales + start * 16
        panel_tile_int4(rows, a_segment, lda, s_segment, lds, b_segment, g_segment, stop - start, c_segment, PANEL * 4)


@kernel
def panel_address(panels, layer, panel):
    """Where a panel of a layer begins: panels (L, P, ...)."""
    return address(panels) + (layer * panels.shape[1] + panel) * panels.strides[1]


PRODUCTS = {
    Float32Weight: _products_float32,
    BFloat16Weight: _products_bfloat16,
    Int8Weight: _products_int8,
    Int4Weight: _products_int4,
}


def whole(k: int) -> np.ndarray:
    """The bounds of one segment: all of K."""
    return np.array([0, k], np.int64)


def quarters(units: int, unit: int) -> np.ndarray:
    """The bounds of four segments of `units` pieces of `unit` values, the first ones longer by a piece: 25 heads
    are 7 + 6 + 6 + 6. With fewer than four pieces there is no way to share them: one segment."""
    if units < 4:
        return whole(units * unit)
    share, longer = divmod(units, 4)
    bounds = [i * share + min(i, longer) for i in range(5)]
    return np.array(bounds, np.int64) * unit
