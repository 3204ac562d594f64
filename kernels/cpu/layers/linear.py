"""The matrix product: out = epilogue(x @ weight.T), over weights packed once into panels.

K may be cut into four segments, each accumulated apart and added as (s0 + s1) + (s2 + s3). That is the order in
which four tensor-parallel ranks would add them, so that one rank or four give the same bits.
"""

from typing import NamedTuple

import numpy as np

from tinygpt.kernels.cpu.jit import inline, kernel
from tinygpt.kernels.cpu.layers.activations import NONE
from tinygpt.kernels.cpu.layers.epilogue import SEGMENT_BYTES, expect_tile, finish_tile
from tinygpt.kernels.cpu.layers.formats import Int4Weight, Int8Weight, Linear
from tinygpt.kernels.cpu.layers.ranks import Ranks, add_partials, exchange
from tinygpt.kernels.cpu.runtime.by_type import by_type
from tinygpt.kernels.cpu.runtime.team import claim, complete, finish_phase
from tinygpt.kernels.cpu.simd.tiles import (
    GROUP,
    GROUPED_ROWS,
    PANEL,
    SCALES_BYTES,
    STEP_BYTES,
    TILE_ROWS,
    WEIGHT_GROUP,
    WEIGHT_SCALES_BYTES,
    panel_tile,
    panel_tile_int4,
    panel_tile_int8,
)
from tinygpt.kernels.cpu.simd.vector_ir import address

# Rows of x that a thread takes on at a time: enough to use each panel well while it is in the L2 cache.
ROW_BLOCK = 8 * TILE_ROWS
PANEL_BYTES = PANEL * 4  # of a row of a tile's result
# What to do with the result. NumPy scalars: Numba would compile one more `linear` for each Python constant.
REPLACE, ADD = np.bool_(False), np.bool_(True)


class Tile(NamedTuple):
    """Which part of a product a tile is."""

    rows: int  # how many
    row: int  # the first of them
    panel: int


@inline
def linear(team, out, x, linears, layer, segments, activation, add):
    """out = activation(x @ weight.T + bias), or out += that if `add`. A phase; an item is a panel and a row block.

    out (M, N) float32, x an operand of M rows, linears a Linear of formats.py, segments: the bounds of the segments of
    K, (2,) or (5,) with no segment empty. Needs epilogue.SCRATCH values of scratch.
    """
    for_each_tile(team, out, x, linears, layer, segments, activation, add, out.shape[0], out.shape[1])


@inline
def linear_to_operand(team, out, x, linears, layer, segments, activation, rows):
    """As `linear` without `add`, into rows of an operand: the next product's activations, converted tile by tile."""
    for_each_tile(team, out, x, linears, layer, segments, activation, REPLACE, rows, linears.bias.shape[1])


@kernel
def for_each_tile(team, out, x, linears, layer, segments, activation, add, rows, columns):
    weight = linears.weight
    height = tile_rows(weight)
    blocks = max((rows + ROW_BLOCK - 1) // ROW_BLOCK, 1)
    items = weight.panels.shape[1] * blocks
    item = claim(team, items)
    while item >= 0:
        panel, block = item // blocks, item % blocks
        stop = min((block + 1) * ROW_BLOCK, rows)
        for row in range(block * ROW_BLOCK, stop, height):
            tile = Tile(min(height, stop - row), row, panel)
            expect_tile(out, tile)
            products(weight, x, tile, layer, segments, team.scratch)
            finish_tile(out, tile, linears, layer, segments, activation, add, columns, team.scratch)
        complete(team, items)
        item = claim(team, items)
    finish_phase(team)


@inline
def add_projection(team, x, y, linears, layer, segments, ranks):
    """x (N, C) += y @ weight.T + bias: the end of each block, and the place where tensor-parallel ranks sum.

    `ranks` is of ranks.py. A rank has some of the segments of K, so the sum over the others comes before the bias.
    """
    out, bias, add = _summand(ranks, x, linears.bias)
    linear(team, out, y, Linear(linears.weight, bias, linears.factors), layer, segments, NONE, add)
    _sum_over(team, ranks, x, linears.bias, layer)


def _all_of_it(ranks, x, bias):
    return x, bias, ADD


def _partial(ranks, x, bias):
    return ranks.partial[: x.shape[0]], ranks.no_bias, REPLACE


# _summand(ranks, x, bias): where a product goes that x needs, with which bias, and whether it is added.
_summand = by_type({Ranks: _partial}, otherwise=_all_of_it)


def _nothing_to_sum(team, ranks, x, bias, layer):
    pass


def _sum_partials(team, ranks, x, bias, layer):
    exchange(team, ranks, ranks.partial, x.size)
    add_partials(team, x, ranks.gathered, ranks.status.size, bias, layer)


# _sum_over(team, ranks, x, bias, layer): add what all ranks have, and the bias.
_sum_over = by_type({Ranks: _sum_partials}, otherwise=_nothing_to_sum, argument=1)


def _few_rows(weight):
    return GROUPED_ROWS


def _many_rows(weight):
    return TILE_ROWS


# tile_rows(weight): how many rows a tile of this weight has at most.
tile_rows = by_type({Int8Weight: _few_rows, Int4Weight: _few_rows}, otherwise=_many_rows)


def _products_plain(weight, x, tile, layer, segments, scratch):
    """float32, or bfloat16 in pairs: STEP_BYTES of a row of x are multiplied in a step."""
    per_step, lda = STEP_BYTES // x.values.itemsize, x.values.shape[1] * x.values.itemsize
    a = address(x.values) + tile.row * lda
    b = panel_address(weight.panels, layer, tile.panel)
    for s in range(segments.size - 1):
        start, stop = segments[s] // per_step, (segments[s + 1] + per_step - 1) // per_step
        a_segment, b_segment = a + start * STEP_BYTES, b + start * PANEL * STEP_BYTES
        c_segment = address(scratch) + s * SEGMENT_BYTES
        ldb = PANEL * STEP_BYTES
        panel_tile(weight.panels, tile.rows, a_segment, lda, b_segment, ldb, stop - start, c_segment, PANEL_BYTES)


def _products_int8(weight, x, tile, layer, segments, scratch):
    lda, lds = x.values.shape[1], x.scales.shape[1] * SCALES_BYTES
    a, scales = address(x.values) + tile.row * lda, address(x.scales) + tile.row * lds
    b = panel_address(weight.panels, layer, tile.panel)
    for s in range(segments.size - 1):
        start, stop = segments[s] // GROUP, (segments[s + 1] + GROUP - 1) // GROUP
        a_segment, s_segment = a + start * GROUP, scales + start * SCALES_BYTES
        b_segment = b + start * GROUP * PANEL
        c_segment = address(scratch) + s * SEGMENT_BYTES
        panel_tile_int8(tile.rows, a_segment, lda, s_segment, lds, b_segment, b, stop - start, c_segment, PANEL_BYTES)


def _products_int4(weight, x, tile, layer, segments, scratch):
    lda, lds = x.values.shape[1], x.scales.shape[1] * SCALES_BYTES
    a, scales = address(x.values) + tile.row * lda, address(x.scales) + tile.row * lds
    b = panel_address(weight.panels, layer, tile.panel)
    b_scales = panel_address(weight.group_scales, layer, tile.panel)
    for s in range(segments.size - 1):
        start, stop = segments[s] // GROUP, (segments[s + 1] + GROUP - 1) // GROUP
        a_segment, s_segment = a + start * GROUP, scales + start * SCALES_BYTES
        b_segment = b + start * GROUP * PANEL // 2
        g_segment = b_scales + start * (GROUP // WEIGHT_GROUP) * WEIGHT_SCALES_BYTES
        c_segment = address(scratch) + s * SEGMENT_BYTES
        panel_tile_int4(
            tile.rows, a_segment, lda, s_segment, lds, b_segment, g_segment, stop - start, c_segment, PANEL_BYTES
        )


# products(weight, x, tile, layer, segments, scratch): scratch[segment, r, column] = the product over one segment of K,
# for a tile's rows; int8 columns unscaled.
products = by_type({Int8Weight: _products_int8, Int4Weight: _products_int4}, otherwise=_products_plain)


@kernel
def panel_address(panels, layer, panel):
    """Where a panel of a layer begins: panels (L, P, ...)."""
    return address(panels) + (layer * panels.shape[1] + panel) * panels.strides[1]


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
