"""The matrix product: out = epilogue(x @ weight.T), over weights in panels.

K may be cut into four segments, added as (s0 + s1) + (s2 + s3), as tensor-parallel ranks add them.
"""

from typing import NamedTuple

import numpy as np

from ..jit import inline, kernel, overload_by_dtype
from ..simd.amx_tiles import amx_bfloat16, amx_int8
from ..simd.grouped_tiles import (
    EXPANDS,
    EXPANSION,
    GROUP_BYTES,
    SCALE_GROUP,
    SCALES_BYTES,
    WEIGHT_GROUP,
    WEIGHT_SCALES_BYTES,
    expand_int4,
    expand_int8,
    tile_int4,
    tile_int8,
)
from ..simd.targets import TARGET
from ..simd.tiles import (
    AHEAD,
    CHUNK_BYTES,
    IN_STRIPS,
    LINE_BYTES,
    OUT_TILE,
    ROW_TILE,
    STEP_BYTES,
    panel_add,
)
from ..simd.vector_ir import address, float32_at
from ..team import claim, complete, finish_phase
from .activations import NONE, ZERO
from .epilogue import EXPANDED, ROW_BLOCK, SEGMENT_BYTES, epilogue, prefetch_tile
from .formats import (
    BFloat16Weight,
    Float32Operand,
    Float32Weight,
    Int4Weight,
    Int8Weight,
    Linear,
)
from .ranks import add_partials, exchange

PANEL_BYTES = OUT_TILE * 4  # of a row of a tile's result
# NumPy scalars: see activations.py.
REPLACE, ADD = np.bool_(False), np.bool_(True)
LEAST_AMX = 5  # rows of int8


class Tile(NamedTuple):
    """Rows and panel of an item of a product, or of a tile."""

    rows: int
    row: int  # the first of them
    panel: int


class Unit(NamedTuple):
    """The least of K that a tile takes: a step or a group."""

    k: int  # values
    bytes: int  # of a panel
    of_chunk: int  # units that several tiles share at a time
    alone: int  # rows up to which a tile takes all of K
    rows: int = ROW_TILE  # of a tile


@inline
def linear(team, out, x, linears, layer, segments, activation, add):
    """Compute out = activation(x @ weight.T + bias), or out += it if `add`. A phase; needs epilogue.SCRATCH of scratch.

    out (M, N) float32, x an operand, linears a Linear, segments: bounds of K's segments.
    """
    for_each_tile(team, out, x, linears, layer, segments, activation, add, out.shape[0], out.shape[1])


def _linear_to_array(team, out, x, linears, layer, segments, activation, rows):
    for_each_tile(
        team, out.values, x, linears, layer, segments, activation, REPLACE, rows, linears.bias.shape[1]
    )


def _linear_to_operand(team, out, x, linears, layer, segments, activation, rows):
    for_each_tile(team, out, x, linears, layer, segments, activation, REPLACE, rows, linears.bias.shape[1])


# `linear` into rows of an operand, quantized tile by tile.
linear_to_operand = overload_by_dtype(
    {Float32Operand: _linear_to_array}, otherwise=_linear_to_operand, argument=1
)


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
            prefetch_tile(out, tile)
            products(linears.weight, x, tile, layer, segments, team.scratch)
            epilogue(out, tile, linears, layer, segments, activation, add, columns, team.scratch)
        complete(team, items)
        item = claim(team, items)
    finish_phase(team)


@kernel
def add_projection(team, x, y, linears, layer, segments, ranks):
    """x (N, C) += y @ weight.T + bias. ranks: a Ranks, whose sum precedes the bias, or None."""
    if ranks is None:
        linear(team, x, y, linears, layer, segments, NONE, ADD)
        return
    partial = ranks.partial[: x.shape[0]]
    without_bias = Linear(linears.weight, ranks.no_bias, linears.factors)
    linear(team, partial, y, without_bias, layer, segments, NONE, REPLACE)
    exchange(team, ranks, ranks.partial, x.size)
    add_partials(team, x, ranks.gathered, ranks.status.size, linears.bias, layer)


@kernel
def rows_together(weight, blocks):
    """Return how many rows share a panel: a tile's rows if other tiles find it in the L2 cache."""
    alone = unit_of(weight).alone
    return alone if blocks > 1 and alone > 1 else ROW_BLOCK


@kernel
def products(weight, x, tile, layer, segments, scratch):
    """Compute scratch[segment, r, column] of a tile's rows; int8 columns are unscaled.

    Many rows take K in chunks, which stay in a cache while the next is fetched.
    """
    panel = panel_address(weight.panels, layer, tile.panel)
    unit = unit_of(weight)
    for s in range(segments.size - 1):
        c = address(scratch) + s * SEGMENT_BYTES
        float32_at(c, tile.rows * OUT_TILE)[:] = ZERO
        start = segments[s] // unit.k
        stop = (segments[s + 1] + unit.k - 1) // unit.k
        chunk = unit.of_chunk if tile.rows > unit.alone else stop - start
        for first in range(start, stop, chunk):
            units = min(chunk, stop - first)
            b = panel + first * unit.bytes
            following = panel + (first + units) * unit.bytes
            if s == segments.size - 2 and first + units == stop:
                following = panel + weight.panels.strides[1]
            add_chunk(weight, x, tile, layer, first, units, b, following, c, scratch)


@kernel
def add_chunk(weight, x, tile, layer, first, units, b, following, c, scratch):
    """Add products of units of K, with weights at `b`, to C (rows, OUT_TILE). following: the next address."""
    height = unit_of(weight).rows
    size = units * unit_of(weight).bytes
    tiles = (tile.rows + height - 1) // height
    if tile.rows <= unit_of(weight).alone:
        following = b + AHEAD
    elif tile.rows > 1:
        b = expand(weight, b, units, scratch)
    for t in range(tiles):  # each prefetches its part of the next chunk: requests of one tile would queue
        low = t * tile.rows // tiles
        high = (t + 1) * tile.rows // tiles
        part = Tile(high - low, tile.row + low, tile.panel)
        ahead = following + t * size // tiles
        spacing = (LINE_BYTES + tiles - 1) // tiles
        add_tile(weight, x, part, layer, first, units, b, c + low * PANEL_BYTES, ahead, spacing)


def _always(unit):
    return lambda weight: unit


STEP = OUT_TILE * STEP_BYTES
# A tile in strips jumps through the panel. The L2 cache is slower than products of integers.
ALONE = 1 if IN_STRIPS else ROW_TILE
UNITS = {dtype: Unit(k, STEP, CHUNK_BYTES // STEP, ALONE) for k, dtype in ((1, "float32"), (2, "bfloat16"))}
UNITS |= {
    dtype: Unit(SCALE_GROUP, size, CHUNK_BYTES // (size * EXPANSION[dtype]), 1)
    for dtype, size in GROUP_BYTES.items()
}
if TARGET.has_amx:
    UNITS |= {dtype: UNITS[dtype]._replace(alone=ROW_BLOCK, rows=ROW_BLOCK) for dtype in ("bfloat16", "int8")}
RECORDS = {"float32": Float32Weight, "bfloat16": BFloat16Weight, "int8": Int8Weight, "int4": Int4Weight}
unit_of = overload_by_dtype({record: _always(UNITS[dtype]) for dtype, record in RECORDS.items()})


def _as_it_lies(weight, b, units, scratch):
    return b


def _expand_int8(weight, b, units, scratch):
    expand_int8(b, units, address(scratch) + EXPANDED * 4)
    return address(scratch) + EXPANDED * 4


def _expand_int4(weight, b, units, scratch):
    expand_int4(b, units, address(scratch) + EXPANDED * 4)
    return address(scratch) + EXPANDED * 4


_expands_int8 = _expand_int8 if EXPANDS["int8"] else _as_it_lies
# expand returns a chunk's address as tiles of several rows multiply it.
expand = overload_by_dtype({Int8Weight: _expands_int8, Int4Weight: _expand_int4}, otherwise=_as_it_lies)


def _add_plain(weight, x, tile, layer, first, units, b, c, ahead, spacing):
    lda = x.values.shape[1] * x.values.itemsize
    step = STEP_BYTES // weight.panels.itemsize * x.values.itemsize
    a = address(x.values) + tile.row * lda + first * step
    panel_add(
        weight.panels, tile.rows, a, lda, b, OUT_TILE * STEP_BYTES, units, c, PANEL_BYTES, ahead, spacing
    )


def _add_bfloat16(weight, x, tile, layer, first, units, b, c, ahead, spacing):
    lda = x.values.shape[1] * x.values.itemsize
    amx_bfloat16(tile.rows, address(x.values) + tile.row * lda + first * 4, lda, b, units, c)


def _add_int8(weight, x, tile, layer, first, units, b, c, ahead, spacing):
    lda = x.values.shape[1] * x.values.itemsize
    lds = x.scales.shape[1] * SCALES_BYTES
    a = address(x.values) + tile.row * lda + first * SCALE_GROUP * x.values.itemsize
    scales = address(x.scales) + tile.row * lds + first * SCALES_BYTES
    tile_bytes(tile.rows, a, lda, scales, lds, b, units, c, ahead, spacing)


def _tile_vnni(rows, a, lda, scales, lds, b, units, c, ahead, spacing):
    tile_int8(rows, a, lda, scales, lds, b, b, units, c, ahead, spacing)


def _tile_amx(rows, a, lda, scales, lds, b, units, c, ahead, spacing):
    if rows < LEAST_AMX:
        tile_int8(rows, a, lda, scales, lds, b, b, units, c, ahead, spacing)
    else:
        amx_int8(rows, a, lda, scales, lds, b, units, c)


tile_bytes = kernel(_tile_amx if TARGET.has_amx else _tile_vnni)


def _add_int4(weight, x, tile, layer, first, units, b, c, ahead, spacing):
    lda = x.values.shape[1] * x.values.itemsize
    lds = x.scales.shape[1] * SCALES_BYTES
    a = address(x.values) + tile.row * lda + first * SCALE_GROUP * x.values.itemsize
    scales = address(x.scales) + tile.row * lds + first * SCALES_BYTES
    b_scales = panel_address(weight.group_scales, layer, tile.panel) + first * INT4_SCALES_BYTES
    tile_int4(tile.rows, a, lda, scales, lds, b, b_scales, units, c, ahead, spacing)


INT4_SCALES_BYTES = SCALE_GROUP // WEIGHT_GROUP * WEIGHT_SCALES_BYTES  # of a group
# add_tile adds some units' products to C (rows, OUT_TILE).
_add_pairs = _add_bfloat16 if TARGET.has_amx else _add_plain
add_tile = overload_by_dtype(
    {BFloat16Weight: _add_pairs, Int8Weight: _add_int8, Int4Weight: _add_int4}, otherwise=_add_plain
)


@kernel
def panel_address(panels, layer, panel):
    return address(panels) + (layer * panels.shape[1] + panel) * panels.strides[1]


def whole(k: int) -> np.ndarray:
    return np.array([0, k], np.int64)


def quarters(units: int, unit: int) -> np.ndarray:
    """Return bounds of four segments of `units` pieces (25 heads: 7 + 6 + 6 + 6), or of one below 4 units."""
    if units < 4:
        return whole(units * unit)
    share, longer = divmod(units, 4)
    bounds = [i * share + min(i, longer) for i in range(5)]
    return np.array(bounds, np.int64) * unit
