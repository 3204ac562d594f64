"""The matrix product: out = epilogue(x @ weight.T), over weights packed once into panels.

K may be cut into four segments, each accumulated apart and added as (s0 + s1) + (s2 + s3). That is the order in
which four tensor-parallel ranks would add them, so that one rank or four give the same bits.
"""

from typing import NamedTuple

import numpy as np

from tinygpt.kernels.cpu.jit import inline, kernel
from tinygpt.kernels.cpu.layers.activations import NONE, ZERO
from tinygpt.kernels.cpu.layers.epilogue import EXPANDED, ROW_BLOCK, SEGMENT_BYTES, expect_tile, finish_tile
from tinygpt.kernels.cpu.layers.formats import (
    BFloat16Weight,
    Float32Operand,
    Float32Weight,
    Int4Weight,
    Int8Weight,
    Linear,
)
from tinygpt.kernels.cpu.layers.ranks import Ranks, add_partials, exchange
from tinygpt.kernels.cpu.runtime.by_type import by_type
from tinygpt.kernels.cpu.runtime.team import claim, complete, finish_phase
from tinygpt.kernels.cpu.simd.grouped_tiles import (
    EXPANDS,
    EXPANSION,
    GROUP,
    GROUP_BYTES,
    SCALES_BYTES,
    WEIGHT_GROUP,
    WEIGHT_SCALES_BYTES,
    expand_int4,
    expand_int8,
    tile_int4,
    tile_int8,
)
from tinygpt.kernels.cpu.simd.tiles import (
    AHEAD,
    CHUNK_BYTES,
    IN_STRIPS,
    LINE_BYTES,
    PANEL,
    STEP_BYTES,
    TILE_ROWS,
    panel_add,
)
from tinygpt.kernels.cpu.simd.vector_ir import address, float32_at

PANEL_BYTES = PANEL * 4  # of a row of a tile's result
# What to do with the result. NumPy scalars: Numba would compile one more `linear` for each Python constant.
REPLACE, ADD = np.bool_(False), np.bool_(True)


class Tile(NamedTuple):
    """Which part of a product an item is, or one tile of it."""

    rows: int  # how many
    row: int  # the first of them
    panel: int


class Unit(NamedTuple):
    """The least of K that a tile takes: a step, or a group."""

    k: int  # how many values
    bytes: int  # of a panel
    of_chunk: int  # how many of them several tiles work on at a time
    alone: int  # up to this many rows, a tile works on all of K by itself


@inline
def linear(team, out, x, linears, layer, segments, activation, add):
    """out = activation(x @ weight.T + bias), or out += that if `add`. A phase; an item is a panel and a row block.

    out (M, N) float32, x an operand of M rows, linears a Linear of formats.py, segments: the bounds of the segments of
    K, (2,), (3,) or (5,) with no segment empty. Needs epilogue.SCRATCH values of scratch.
    """
    for_each_tile(team, out, x, linears, layer, segments, activation, add, out.shape[0], out.shape[1])


def _linear_to_array(team, out, x, linears, layer, segments, activation, rows):
    for_each_tile(team, out.values, x, linears, layer, segments, activation, REPLACE, rows, linears.bias.shape[1])


def _linear_to_operand(team, out, x, linears, layer, segments, activation, rows):
    for_each_tile(team, out, x, linears, layer, segments, activation, REPLACE, rows, linears.bias.shape[1])


# linear_to_operand(team, out, x, linears, layer, segments, activation, rows): as `linear` without `add`, into rows of
# an operand: the next product's activations, converted tile by tile. float32 needs no other code than an array.
linear_to_operand = by_type({Float32Operand: _linear_to_array}, otherwise=_linear_to_operand, argument=1)


@kernel
def for_each_tile(team, out, x, linears, layer, segments, activation, add, rows, columns):
    blocks = max((rows + ROW_BLOCK - 1) // ROW_BLOCK, 1)
    items = linears.weight.panels.shape[1] * blocks
    height = rows_together(linears.weight, blocks)
    item = claim(team, items)
    while item >= 0:
        panel, block = item // blocks, item % blocks
        stop = min((block + 1) * ROW_BLOCK, rows)
        for row in range(block * ROW_BLOCK, stop, height):
            tile = Tile(min(height, stop - row), row, panel)
            expect_tile(out, tile)
            products(linears.weight, x, tile, layer, segments, team.scratch)
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


@kernel
def rows_together(weight, blocks):
    """How many rows of a block go through a panel together: one block reads it from memory, all its rows at once;
    several find it in the L2 cache, and take it tile by tile if that is fast enough for their products."""
    alone = unit_of(weight).alone
    return alone if blocks > 1 and alone > 1 else ROW_BLOCK


@kernel
def products(weight, x, tile, layer, segments, scratch):
    """scratch[segment, r, column] = the product over one segment of K, for a tile's rows; int8 columns unscaled.

    More rows than one tile has take K in chunks, each of which stays in a cache for all their tiles while the next one
    is fetched. So memory and arithmetic take their time at once, not one after the other.
    """
    panel, unit = panel_address(weight.panels, layer, tile.panel), unit_of(weight)
    for s in range(segments.size - 1):
        c = address(scratch) + s * SEGMENT_BYTES
        float32_at(c, tile.rows * PANEL)[:] = ZERO
        start, stop = segments[s] // unit.k, (segments[s + 1] + unit.k - 1) // unit.k
        chunk = unit.of_chunk if tile.rows > unit.alone else stop - start
        for first in range(start, stop, chunk):
            units = min(chunk, stop - first)
            b, following = panel + first * unit.bytes, panel + (first + units) * unit.bytes
            if s == segments.size - 2 and first + units == stop:
                following = panel + weight.panels.strides[1]
            add_chunk(weight, x, tile, layer, first, units, b, following, c, scratch)


@kernel
def add_chunk(weight, x, tile, layer, first, units, b, following, c, scratch):
    """Add the products of some units of K, whose weights lie at `b`, to C (rows, PANEL); `following`: what is next."""
    tiles, size = (tile.rows + TILE_ROWS - 1) // TILE_ROWS, units * unit_of(weight).bytes
    if tile.rows <= unit_of(weight).alone:
        following = b + AHEAD
    elif tile.rows > 1:
        b = expand(weight, b, units, scratch)
    asking = min(tiles, ASKING)
    for t in range(tiles):
        low, high = t * tile.rows // tiles, (t + 1) * tile.rows // tiles  # of heights that differ by 1 at most
        part = Tile(high - low, tile.row + low, tile.panel)
        spacing, ahead = (LINE_BYTES + asking - 1) // asking if t < asking else 0, following + t * size // asking
        add_tile(weight, x, part, layer, first, units, b, c + low * PANEL_BYTES, ahead, spacing)


def _always(unit):
    return lambda weight: unit


STEP = PANEL * STEP_BYTES
# Not where a tile of several rows takes its columns in strips, which would jump through the panel; nor in integers,
# which are multiplied faster than the L2 cache yields them.
ALONE = 1 if IN_STRIPS else TILE_ROWS
# How many tiles ask for a part of the next chunk each: all, as one tile's requests for all of it wait in a queue. But
# in strips a tile has so many steps that each line would be asked for a dozen times.
ASKING = 2 if IN_STRIPS else ROW_BLOCK
# Where a tile goes straight through its panel, the L2 cache yields float32 and bfloat16 as fast as they are multiplied:
# then a chunk fills a part of that one, and each tile is begun less often.
PLAIN_CHUNK_BYTES = CHUNK_BYTES if IN_STRIPS else 4 * CHUNK_BYTES
FLOAT32_UNIT, BFLOAT16_UNIT = (Unit(k, STEP, PLAIN_CHUNK_BYTES // STEP, ALONE) for k in (1, 2))
INT8_UNIT, INT4_UNIT = (
    Unit(GROUP, size, CHUNK_BYTES // (size * EXPANSION[dtype]), 1) for dtype, size in GROUP_BYTES.items()
)
# unit_of(weight): its Unit.
unit_of = by_type(
    {
        Float32Weight: _always(FLOAT32_UNIT),
        BFloat16Weight: _always(BFLOAT16_UNIT),
        Int8Weight: _always(INT8_UNIT),
        Int4Weight: _always(INT4_UNIT),
    }
)


def _as_it_lies(weight, b, units, scratch):
    return b


def _expand_int8(weight, b, units, scratch):
    expand_int8(b, units, address(scratch) + EXPANDED * 4)
    return address(scratch) + EXPANDED * 4


def _expand_int4(weight, b, units, scratch):
    expand_int4(b, units, address(scratch) + EXPANDED * 4)
    return address(scratch) + EXPANDED * 4


_expands_int8 = _expand_int8 if EXPANDS["int8"] else _as_it_lies
# expand(weight, b, units, scratch): where a chunk lies as tiles of several rows multiply it; it begins at `b`.
expand = by_type({Int8Weight: _expands_int8, Int4Weight: _expand_int4}, otherwise=_as_it_lies)


def _add_plain(weight, x, tile, layer, first, units, b, c, ahead, spacing):
    lda, step = x.values.shape[1] * x.values.itemsize, STEP_BYTES // weight.panels.itemsize * x.values.itemsize
    a = address(x.values) + tile.row * lda + first * step
    panel_add(weight.panels, tile.rows, a, lda, b, PANEL * STEP_BYTES, units, c, PANEL_BYTES, ahead, spacing)


def _add_int8(weight, x, tile, layer, first, units, b, c, ahead, spacing):
    lda, lds = x.values.shape[1] * x.values.itemsize, x.scales.shape[1] * SCALES_BYTES
    a = address(x.values) + tile.row * lda + first * GROUP * x.values.itemsize
    scales = address(x.scales) + tile.row * lds + first * SCALES_BYTES
    tile_int8(tile.rows, a, lda, scales, lds, b, b, units, c, ahead, spacing)


def _add_int4(weight, x, tile, layer, first, units, b, c, ahead, spacing):
    lda, lds = x.values.shape[1] * x.values.itemsize, x.scales.shape[1] * SCALES_BYTES
    a = address(x.values) + tile.row * lda + first * GROUP * x.values.itemsize
    scales = address(x.scales) + tile.row * lds + first * SCALES_BYTES
    b_scales = panel_address(weight.group_scales, layer, tile.panel) + first * INT4_SCALES_BYTES
    tile_int4(tile.rows, a, lda, scales, lds, b, b_scales, units, c, ahead, spacing)


INT4_SCALES_BYTES = GROUP // WEIGHT_GROUP * WEIGHT_SCALES_BYTES  # of a group
# add_tile(weight, x, tile, layer, first, units, b, c, ahead, spacing): add some units' products to C (rows, PANEL) of a
# tile of up to TILE_ROWS rows. The weights lie at `b`, expanded unless the tile is of one row.
add_tile = by_type({Int8Weight: _add_int8, Int4Weight: _add_int4}, otherwise=_add_plain)


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
