"""The matrix product: out = epilogue(x @ weight.T), over weights in panels.

K may be cut into four segments, added as (s0 + s1) + (s2 + s3), as tensor-parallel ranks add them. The epilogue of a
tile works in the L1 cache: segments, scales, bias, activation, residual, output.

LoRA's updates of a step's rows follow: out += up @ (down @ x), each row by the adapter of its KV slot. A sum is one
chain in a fixed order, without fused operations: a row has the same bits in any batch.
"""

from typing import Any, NamedTuple

import numpy as np

from ...backend import LINEARS
from ...numbers import even_bounds, stacked_adapters
from ..dtypes import Tile, add_tile, expand, panel_address, scales_of, unit_of
from ..jit import inline, kernel, overload_by_dtype
from ..simd.tiles import AHEAD, CHUNK_BYTES, LINE_BYTES, OUT_TILE, ROW_BLOCK
from ..simd.vector_ir import (
    ROW_BYTES,
    add_rows,
    address,
    expect_write,
    float32_at,
    put_rows,
    sum_2_segments,
    sum_4_segments,
)
from ..team import claim, claim_rows, complete, complete_rows, finish_phase
from .activations import NONE, ONE, ZERO, activate
from .operands import Float32Operand, put, put_panel
from .ranks import add_partials, exchange

MAX_SEGMENTS = 4
SEGMENT_BYTES = ROW_BLOCK * OUT_TILE * 4
# The scratch of a product, in float32: segments; rows of 1, of -0, of a last panel's biases; a chunk.
ONES = MAX_SEGMENTS * ROW_BLOCK * OUT_TILE
MINUS_ZEROS = ONES + OUT_TILE
BIASES = ONES + 2 * OUT_TILE
EXPANDED = BIASES + OUT_TILE
SCRATCH = EXPANDED + CHUNK_BYTES // 4
# NumPy scalars: see activations.py.
C_ATTN, ATTN_PROJ, C_FC, MLP_PROJ = np.arange(len(LINEARS))
REPLACE, ADD = np.bool_(False), np.bool_(True)
MINUS_ZERO = np.float32(-0.0)  # x + 0 would make 0 of -0


class Linear(NamedTuple):
    weight: Any  # (L, N, K), a record of dtypes.py
    bias: np.ndarray  # (L, N) float32, or (1, 0) for none
    factors: np.ndarray  # (L, P * OUT_TILE) float32: smoothing factors of the outputs, or (1, 0)


class Factors(NamedTuple):
    """Of A adapters, padded with zeros to the greatest rank r, which is less than a product's scratch."""

    down: np.ndarray  # (A, L, K, r) float32
    up: np.ndarray  # (A, L, r, N) float32


class Adapters(NamedTuple):
    of_slot: np.ndarray  # (slots,) int32: the adapter of each slot of the KV cache, -1 for none
    factors: tuple[Factors, ...]  # by C_ATTN, ATTN_PROJ, ...


@inline
def linear(team, out, x, linears, layer, segments, activation, add):
    """Compute out = activation(x @ weight.T + bias), or out += it if `add`. A phase; needs SCRATCH values of scratch.

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
    items = linears.weight.panels.shape[1] * blocks if rows > 0 else 1
    height = rows_together(linears.weight, blocks)
    item = claim(team, items)
    while item >= 0:
        panel, block = item // blocks, item % blocks
        stop = min((block + 1) * ROW_BLOCK, rows)
        for row in range(block * ROW_BLOCK, stop, height):
            tile = Tile(min(height, stop - row), row, panel)
            compute_tile(team, out, x, linears, layer, segments, activation, add, columns, tile)
        complete(team, items)
        item = claim(team, items)
    finish_phase(team)


@kernel
def compute_tile(team, out, x, linears, layer, segments, activation, add, columns, tile):
    prefetch_tile(out, tile)
    products(linears.weight, x, tile, layer, segments, team.scratch)
    epilogue(out, tile, linears, layer, segments, activation, add, columns, team.scratch)


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
def add_adapters(team, out, x, adapters, kind, layer, slots):
    """out (N, n) += each row's update of x (N, K). A phase, if there are adapters.

    In the residual stream it comes before hooks set the stream aside: a sum has the same bits with and without hooks.
    """
    if adapters is None:
        return
    down = adapters.factors[kind].down
    up = adapters.factors[kind].up
    low = float32_at(address(team.scratch), up.shape[2])
    k = down.shape[2]
    first, last = claim_rows(team, slots.size)
    while first >= 0:
        for i in range(first, last):
            adapter = adapters.of_slot[slots[i]]
            row = float32_at(address(out) + i * out.strides[0], out.shape[1])
            if adapter >= 0 and low.size:
                values = float32_at(address(x) + i * x.strides[0], k)
                _add_update(row, values, down[adapter, layer], up[adapter, layer], low)
        complete_rows(team, slots.size)
        first, last = claim_rows(team, slots.size)
    finish_phase(team)


@kernel
def _add_update(row, values, down, up, low):
    low[:] = ZERO
    for k in range(values.size):
        for j in range(low.size):
            low[j] += values[k] * down[k, j]
    for j in range(low.size):
        for n in range(row.size):
            row[n] += low[j] * up[j, n]


@kernel
def rows_together(weight, blocks):
    """Return how many rows share a panel: a tile's rows if other tiles find it in the L2 cache."""
    unit = unit_of(weight)
    return unit.alone if blocks > 1 and unit.alone > unit.unpacked else ROW_BLOCK


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
    unit = unit_of(weight)
    size = units * unit.bytes
    tiles = (tile.rows + unit.rows - 1) // unit.rows
    expands = tile.rows > max(unit.alone, unit.unpacked)
    if expands:
        b = expand(weight, b, units, address(scratch) + EXPANDED * 4)
    if tile.rows <= unit.alone:
        following = b + AHEAD
    for t in range(tiles):  # each prefetches its part of the next chunk: requests of one tile would queue
        low = t * tile.rows // tiles
        high = (t + 1) * tile.rows // tiles
        part = Tile(high - low, tile.row + low, tile.panel)
        ahead = following + t * size // tiles
        spacing = (LINE_BYTES + tiles - 1) // tiles
        add_tile(weight, x, part, layer, first, units, b, expands, c + low * ROW_BYTES, ahead, spacing)


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
store_tile = overload_by_dtype({"float32": _store_array}, otherwise=_store_operand)


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
prefetch_tile = overload_by_dtype({"float32": _prefetch_array}, otherwise=_prefetch_operand)


def whole(k: int) -> np.ndarray:
    return np.array([0, k], np.int64)


def quarters(units: int, unit: int) -> np.ndarray:
    """Return bounds of four segments of `units` pieces (25 heads: 7 + 6 + 6 + 6), or of one below 4 units."""
    if units < 4:
        return whole(units * unit)
    return np.array(even_bounds(units, 4), np.int64) * unit


def with_adapters(
    params: Any, config: Any, adapters: list[dict[str, tuple]], num_slots: int
) -> tuple[Any, np.ndarray]:
    """Return Params with adapters, and `of_slot`. adapters: {name of a linear layer: (down (r, K), up (N, r))}."""
    factors = tuple(_stacked(adapters, config.n_layer, name) for name in LINEARS.values())
    of_slot = np.full(num_slots, -1, np.int32)
    return params._replace(adapters=Adapters(of_slot, factors)), of_slot


def _stacked(adapters: list[dict[str, tuple]], layers: int, name: str) -> Factors:
    down, up = stacked_adapters(adapters, [f"h.{layer}.{name}" for layer in range(layers)])
    return Factors(np.ascontiguousarray(down.swapaxes(2, 3)), up)
