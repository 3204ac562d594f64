"""A row for each dtype of weights: what differs between dtypes stands here, and kernels choose by a weight's record.

Weights lie in panels of OUT_TILE columns, by steps of K. A function of a row is compiled for the row's record alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .jit import inline, kernel, overload_by_dtype
from .layers.operands import (
    Float32Operand,
    from_bfloat16,
    new_bfloat16_operand,
    new_float32_operand,
    new_int8_operand,
)
from .packing import (
    WORK_ROWS,
    pack_bfloat16,
    pack_float16,
    pack_float32,
    pack_int4,
    pack_int8,
    unpack_bfloat16,
    unpack_float16,
    unpack_float32,
    unpack_int4,
    unpack_int8,
)
from .simd.amx_tiles import amx_bfloat16, amx_int8
from .simd.grouped_tiles import expand_int4, expand_int8, tile_int4, tile_int8, unpacking_int8
from .simd.products import INT4, INT8, from_float16
from .simd.targets import TARGET
from .simd.tiles import (
    CHUNK_BYTES,
    IN_STRIPS,
    OUT_TILE,
    ROW_BLOCK,
    ROW_TILE,
    STEP_BYTES,
    panel_add,
    widen_float16,
)
from .simd.vector_ir import (
    ROW_BYTES,
    SCALE_GROUP,
    SCALES_BYTES,
    WEIGHT_GROUP,
    WEIGHT_SCALES_BYTES,
    address,
    uint32_at,
    zeros,
)

LEAST_AMX = 5  # rows of int8


class Float32Weight(NamedTuple):
    panels: np.ndarray  # (L, P, K, OUT_TILE) float32


class Float16Weight(NamedTuple):
    panels: np.ndarray  # (L, P, K, OUT_TILE) int16


class BFloat16Weight(NamedTuple):
    panels: np.ndarray  # (L, P, K / 2, OUT_TILE, 2) uint16, K rounded up to 2


class Int8Weight(NamedTuple):
    """weight[n, k] = (panels - 128) * scales[n]."""

    panels: np.ndarray  # (L, P, K / 4, OUT_TILE, 4) uint8, K rounded up to SCALE_GROUP
    scales: np.ndarray  # (L, P * OUT_TILE) float32


class Int4Weight(NamedTuple):
    """weight[n, k] = nibble * scale + offset."""

    panels: np.ndarray  # (L, P, K / 8, OUT_TILE, 4) uint8: step 2i in the low half of byte i
    group_scales: np.ndarray  # (L, P, K / WEIGHT_GROUP, 2, OUT_TILE) uint16: bfloat16 scale, offset


class Field(NamedTuple):
    """An array of a weight's record: (L, P, K / per_index, *step), or a number a column, (L, P * OUT_TILE)."""

    dtype: Any
    per_index: int = 0  # values of K; 0: a number a column
    step: tuple[int, ...] = ()

    def shape(self, layers: int, panels: int, k: int) -> tuple[int, ...]:
        if not self.per_index:
            return layers, panels * OUT_TILE
        return layers, panels, k // self.per_index, *self.step

    @property
    def column_axis(self) -> int:
        return 3 + self.step.index(OUT_TILE)


class Unit(NamedTuple):
    """The least of K that a tile takes: a step or a group."""

    k: int  # values
    bytes: int  # of a panel
    of_chunk: int  # units that several tiles share at a time
    alone: int  # rows up to which a tile takes all of K
    unpacked: int = 1  # rows up to which tiles take a panel as it lies
    rows: int = ROW_TILE  # of a tile


class Tile(NamedTuple):
    """Rows and panel of an item of a product, or of a tile."""

    rows: int
    row: int  # the first of them
    panel: int


# Tiles: products of some units of K are added to C (rows, OUT_TILE), by weights at `b`, expanded by `expand` or not.


def _add_steps(weight, x, tile, layer, first, units, b, expanded, c, ahead, spacing):
    lda = x.values.shape[1] * x.values.itemsize
    a = address(x.values) + tile.row * lda + first * unit_of(weight).k * x.values.itemsize
    ldb = unit_of(weight).bytes
    panel_add(weight.panels, tile.rows, a, lda, b, ldb, units, c, ROW_BYTES, ahead, spacing)


def _add_float16(weight, x, tile, layer, first, units, b, expanded, c, ahead, spacing):
    if not expanded:
        as_it_lies(weight, x, tile, layer, first, units, b, expanded, c, ahead, spacing)
        return
    lda = x.values.shape[1] * x.values.itemsize
    a = address(x.values) + tile.row * lda + first * x.values.itemsize
    panel_add(x.values, tile.rows, a, lda, b, STEP, units, c, ROW_BYTES, ahead, spacing // 2)


as_it_lies = kernel(_add_steps)


def _add_amx_bfloat16(weight, x, tile, layer, first, units, b, expanded, c, ahead, spacing):
    lda = x.values.shape[1] * x.values.itemsize
    amx_bfloat16(tile.rows, address(x.values) + tile.row * lda + first * 4, lda, b, units, c)


@inline
def _grouped_rows(x, tile, first):
    """Return a tile's activations of int8 from group `first` on, and their scales: each address and stride in bytes."""
    lda = x.values.shape[1] * x.values.itemsize
    lds = x.scales.shape[1] * SCALES_BYTES
    a = address(x.values) + tile.row * lda + first * SCALE_GROUP * x.values.itemsize
    scales = address(x.scales) + tile.row * lds + first * SCALES_BYTES
    return a, lda, scales, lds


def _add_int8(weight, x, tile, layer, first, units, b, expanded, c, ahead, spacing):
    a, lda, scales, lds = _grouped_rows(x, tile, first)
    tile_bytes(tile.rows, a, lda, scales, lds, b, units, c, ahead, spacing)


def _add_int8_as_it_lies(weight, x, tile, layer, first, units, b, expanded, c, ahead, spacing):
    a, lda, scales, lds = _grouped_rows(x, tile, first)
    if expanded:
        tile_int8(tile.rows, a, lda, scales, lds, b, b, units, c, ahead, spacing)
    else:
        unpacking_int8(tile.rows, a, lda, scales, lds, b, b, units, c, ahead, spacing)


def _tile_vnni(rows, a, lda, scales, lds, b, units, c, ahead, spacing):
    tile_int8(rows, a, lda, scales, lds, b, b, units, c, ahead, spacing)


def _tile_amx(rows, a, lda, scales, lds, b, units, c, ahead, spacing):
    if rows < LEAST_AMX:
        tile_int8(rows, a, lda, scales, lds, b, b, units, c, ahead, spacing)
    else:
        amx_int8(rows, a, lda, scales, lds, b, units, c)


tile_bytes = kernel(_tile_amx if TARGET.has_amx else _tile_vnni)


def _add_int4(weight, x, tile, layer, first, units, b, expanded, c, ahead, spacing):
    a, lda, scales, lds = _grouped_rows(x, tile, first)
    b_scales = panel_address(weight.group_scales, layer, tile.panel) + first * INT4_SCALES_BYTES
    tile_int4(tile.rows, a, lda, scales, lds, b, b_scales, units, c, ahead, spacing)


INT4_SCALES_BYTES = SCALE_GROUP // WEIGHT_GROUP * WEIGHT_SCALES_BYTES  # of a group


@kernel
def panel_address(panels, layer, panel):
    return address(panels) + (layer * panels.shape[1] + panel) * panels.strides[1]


# A chunk as tiles of several rows multiply it, whose address is returned.


def _as_it_lies(weight, b, units, chunk):
    return b


def _expand_int8(weight, b, units, chunk):
    expand_int8(b, units, chunk)
    return chunk


def _expand_float16(weight, b, units, chunk):
    widen_float16(b, units, chunk)
    return chunk


def _expand_int4(weight, b, units, chunk):
    expand_int4(b, units, chunk)
    return chunk


# The address of the scales of a panel's columns.


def _ones(weight, layer, panel, ones):
    return ones


def _scales_of_columns(weight, layer, panel, ones):
    return address(weight.scales) + (layer * weight.scales.shape[1] + panel * OUT_TILE) * 4


# One weight, of the embedding.


def _float32_at(weight, panel, k, column):
    return weight.panels[0, panel, k, column]


def _float16_at(weight, panel, k, column):
    return from_float16(weight.panels[0, panel, k, column])


def _bfloat16_at(weight, panel, k, column):
    pairs = uint32_at(panel_address(weight.panels, 0, panel) + k // 2 * ROW_BYTES, OUT_TILE)
    return from_bfloat16(pairs[column] >> np.uint32(16 * (k % 2)))


def _int8_at(weight, panel, k, column):
    level = np.int32(weight.panels[0, panel, k // 4, column, k % 4]) - np.int32(128)
    return np.float32(level) * weight.scales[0, panel * OUT_TILE + column]


@dataclass(frozen=True)
class Dtype:
    """What kernels know of a dtype. weights/config.py has what reports say of it."""

    name: str
    record: type
    fields: dict[str, Field]  # of the record
    k_unit: int  # of segments of K; a panel's K is a multiple
    new_operand: Callable  # (n, k) -> the operand of activations that a weight is multiplied by
    pack: Callable  # of packing.py
    unpack: Callable  # (*a layer's arrays) -> (P, K, OUT_TILE) float32
    unit: Unit
    add_tile: Callable
    head: str  # the dtype of wte and the head, which need more than four bits
    element_at: Callable | None = None  # of an embedding
    expand: Callable = _as_it_lies
    scales_of: Callable = _ones
    kv_cache: str = "bfloat16"  # its default dtype
    largest: float | None = None  # finite number; None: float32's
    runs: bool = True  # whether this CPU has the instructions
    # The exponent of a channel's size in smoothing; None: weights are not smoothed. int4 weights, with 16 levels, gain
    # more than activations.
    balance: float | None = None

    def whole_k(self, k: int) -> int:
        """Return K of a panel."""
        return -(-k // self.k_unit) * self.k_unit

    def operand_of(self, x: np.ndarray) -> Any:
        """Return an operand for the rows of x (N, K): of float32 activations, x itself."""
        if self.new_operand is new_float32_operand:
            return Float32Operand(x)
        return self.new_operand(*x.shape)


STEP = OUT_TILE * STEP_BYTES
# A tile in strips jumps through the panel. The L2 cache is slower than products of integers.
ALONE = 1 if IN_STRIPS else ROW_TILE


# In two tiles of int8; more rows gain from a panel that is expanded once.
UNPACKED = 8 if INT8.expansion > 1 else 1


def _grouped_unit(size: int, expansion: int) -> Unit:
    return Unit(SCALE_GROUP, size, CHUNK_BYTES // (size * expansion), 1)


def _in_amx(unit: Unit) -> Unit:
    return unit._replace(alone=ROW_BLOCK, rows=ROW_BLOCK) if TARGET.has_amx else unit


DTYPES = {
    row.name: row
    for row in (
        Dtype(
            name="float32",
            record=Float32Weight,
            fields={"panels": Field(np.float32, 1, (OUT_TILE,))},
            k_unit=1,
            new_operand=new_float32_operand,
            pack=pack_float32,
            unpack=unpack_float32,
            unit=Unit(1, STEP, CHUNK_BYTES // STEP, ALONE),
            add_tile=_add_steps,
            head="float32",
            element_at=_float32_at,
            kv_cache="float32",
        ),
        Dtype(
            name="float16",
            record=Float16Weight,
            fields={"panels": Field(np.int16, 1, (OUT_TILE,))},
            k_unit=1,
            new_operand=new_float32_operand,
            pack=pack_float16,
            unpack=unpack_float16,
            unit=Unit(1, STEP // 2, CHUNK_BYTES // STEP, ALONE, 2 * ROW_TILE),
            add_tile=_add_float16,
            expand=_expand_float16,
            head="float16",
            element_at=_float16_at,
            kv_cache="float32",
            largest=np.finfo(np.float16).max,
            runs=TARGET.widens_float16,
        ),
        Dtype(
            name="bfloat16",
            record=BFloat16Weight,
            fields={"panels": Field(np.uint16, 2, (OUT_TILE, 2))},
            k_unit=2,
            new_operand=new_bfloat16_operand,
            pack=pack_bfloat16,
            unpack=unpack_bfloat16,
            unit=_in_amx(Unit(2, STEP, CHUNK_BYTES // STEP, ALONE)),
            add_tile=_add_amx_bfloat16 if TARGET.has_amx else _add_steps,
            head="bfloat16",
            element_at=_bfloat16_at,
        ),
        Dtype(
            name="int8",
            record=Int8Weight,
            fields={"panels": Field(np.uint8, 4, (OUT_TILE, 4)), "scales": Field(np.float32)},
            k_unit=SCALE_GROUP,
            new_operand=partial(new_int8_operand, INT8.operand_bytes),
            pack=pack_int8,
            unpack=unpack_int8,
            unit=_in_amx(_grouped_unit(INT8.group_bytes, INT8.expansion))._replace(unpacked=UNPACKED),
            add_tile=_add_int8_as_it_lies if INT8.expansion > 1 else _add_int8,
            head="int8",
            element_at=_int8_at,
            expand=_expand_int8 if INT8.expands else _as_it_lies,
            scales_of=_scales_of_columns,
            balance=0.5,
        ),
        Dtype(
            name="int4",
            record=Int4Weight,
            fields={
                "panels": Field(np.uint8, 8, (OUT_TILE, 4)),
                "group_scales": Field(np.uint16, WEIGHT_GROUP, (2, OUT_TILE)),
            },
            k_unit=SCALE_GROUP,
            new_operand=partial(new_int8_operand, INT4.operand_bytes),
            pack=pack_int4,
            unpack=unpack_int4,
            unit=_grouped_unit(INT4.group_bytes, INT4.expansion),
            add_tile=_add_int4,
            head="int8",
            expand=_expand_int4,
            balance=0.0,
        ),
    )
    if row.runs
}


def by_record(name: str) -> Callable:
    """Return one name, for compiled code, of a function of the rows: the first argument's record chooses."""
    return overload_by_dtype({row.record: getattr(row, name) for row in DTYPES.values()})


add_tile = by_record("add_tile")
element_at = by_record("element_at")
expand = by_record("expand")
scales_of = by_record("scales_of")


def _always(unit: Unit) -> Callable:
    return lambda weight: unit


unit_of = overload_by_dtype({row.record: _always(row.unit) for row in DTYPES.values()})


def panel_count(columns: int) -> int:
    return -(-columns // OUT_TILE)


def weight_layout(dtype: str, layers: int, n: int, k: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return shape and dtype of each array of a record, for weights (N, K)."""
    row = DTYPES[dtype]
    whole_k = row.whole_k(k)
    return {
        name: (array.shape(layers, panel_count(n), whole_k), np.dtype(array.dtype))
        for name, array in row.fields.items()
    }


def new_weight(dtype: str, layers: int, n: int, k: int) -> Any:
    layout = weight_layout(dtype, layers, n, k)
    return DTYPES[dtype].record(**{name: zeros(*array) for name, array in layout.items()})


def pack(
    dtype: str,
    weight: np.ndarray,
    is_transposed: bool,
    factors: np.ndarray,
    arrays: list,
    first: int,
    last: int,
) -> None:
    """Pack panels `first` to `last` of a layer's weight (N, K), or (K, N), times factors (K,)."""
    row = DTYPES[dtype]
    work = np.empty((WORK_ROWS + row.whole_k(factors.size), OUT_TILE), np.float32)
    row.pack(weight, is_transposed, factors, work, *arrays, first, last)


def unpack(dtype: str, arrays: tuple[np.ndarray, ...], n: int, k: int) -> np.ndarray:
    """Return a layer's weight (N, K) in float32."""
    values = DTYPES[dtype].unpack(*arrays)  # (P, K, OUT_TILE)
    return values.transpose(0, 2, 1).reshape(-1, values.shape[1])[:n, :k]
