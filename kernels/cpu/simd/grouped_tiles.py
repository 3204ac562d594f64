"""Tiles of quantized weights: integers add up over a group of K, exactly, folded to float32 once a group."""

from typing import Any, NamedTuple

from llvmlite import ir

from .arm_tiles import ROWS_TOGETHER, expand_lanes, make_lane_grouped_code
from .products import INT4, INT8, INTEGER_STEPS, Grouped, has_room, strip_of, unpacked
from .targets import TARGET
from .tiles import LINE_BYTES, OUT_TILE, for_each_height
from .vector_ir import (
    F32,
    FLOATS,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    PANEL_VECTORS,
    ROW_BYTES,
    SCALE_GROUP,
    VECTOR_BYTES,
    WEIGHT_SCALES_BYTES,
    ask_part_ahead,
    at,
    emits,
    load,
    load_to_lanes,
    multiply_add,
    part_rows,
    repeat,
    rows_at,
    splat,
    store,
    store_each,
    times,
)

# Rows of B in a turn of the loop of a tile with one vector of columns. One and four are slower.
ROWS_IN_TURN = 2


def make_grouped_tile(kind: Grouped, unpacks: bool = False):
    """Return the intrinsic tile(rows, a, lda, scales, lds, b, b_scales, groups, c, ahead, spacing): C += A @ B.

    Addresses, byte strides; C is (rows, OUT_TILE). a: operand_bytes each; scales: see Int8Operand.
    b, int8: weights + 128; sums start at -128 sum(a), and the caller applies columns' scales.
    b, int4: weights 0..15, two steps a byte; b_scales: bfloat16 scales and offsets of each WEIGHT_GROUP.
    Several rows take b expanded by make_expand, unless the tile `unpacks`. Prefetches as make_tile.
    """
    code = make_lane_grouped_code(kind) if kind.is_neon else tile_code(kind, unpacks)

    @emits("void", *["intp"] * 11)
    def tile(builder, rows, a, lda, scales, lds, b, b_scales, groups, c, ahead, spacing):
        for_each_height(builder, code, rows, a, lda, scales, lds, b, b_scales, groups, c, ahead, spacing)

    return tile


def tile_code(kind: Grouped, unpacks: bool):
    def code(builder, rows, a, lda, scales, lds, *others):
        a_starts = rows_at(builder, a, lda, rows)
        s_starts = rows_at(builder, scales, lds, rows)
        GroupTile(kind, unpacks, builder, a_starts, s_starts, *others).emit()

    return code


class Strip(NamedTuple):
    """Some vectors of columns."""

    number: Any
    columns: Any  # bytes before it in a row of B or C
    places: list  # of C's vectors, row by row


class Part(NamedTuple):
    """The K of a loop: SCALE_GROUP, or a WEIGHT_GROUP of int4."""

    number: Any
    first_turn: Any
    a_rows: list
    s_rows: list


class GroupTile:
    """The code of a tile of some rows, but for ARM: strips of columns take parts of K, a loop each, and turns of it."""

    def __init__(
        self, kind: Grouped, unpacks, builder, a_starts, s_starts, b, b_scales, groups, c, ahead, spacing
    ):
        rows = len(a_starts)
        self.kind = kind
        self.builder = builder
        self.starts = a_starts, s_starts
        self.b = b
        self.b_scales = b_scales
        self.groups = groups
        self.prefetching = ahead, spacing
        self.integer = INTEGER_STEPS[kind.product]
        self.vectors, self.keeps_totals = _strip_of(rows)
        self.strips = PANEL_VECTORS // self.vectors
        self.parts = SCALE_GROUP // kind.part_k
        self.per_load = kind.expansion if rows == 1 or unpacks else 1  # steps that a load serves
        self.together = ROWS_IN_TURN if self.vectors == 1 else 1  # rows of B that a turn takes
        self.turns = kind.part_k // self.integer.k // self.per_load // self.together
        self.c_rows = [at(builder, c, r, ROW_BYTES) for r in range(rows)]

    def emit(self):
        parts = times(self.builder, self.groups, self.parts)
        if self.keeps_totals:
            self.take_strips(I64(0), parts)
        else:
            repeat(self.builder, parts, lambda part, _: self.take_strips(part, 1))

    def take_strips(self, first_part, count):
        repeat(self.builder, self.strips, lambda number, _: self.take_parts(number, first_part, count))

    def take_parts(self, number, first_part, count):
        builder = self.builder
        columns = times(builder, number, self.vectors * VECTOR_BYTES)
        starts = [builder.add(c_row, columns) for c_row in self.c_rows]
        places = [at(builder, start, v, VECTOR_BYTES) for start in starts for v in range(self.vectors)]
        strip = Strip(number, columns, places)

        def take_part(part, totals):
            totals = self.part(strip, builder.add(first_part, part), totals)
            if self.keeps_totals:
                return totals
            store_each(builder, totals, places)

        if self.keeps_totals:
            store_each(builder, repeat(builder, count, take_part, self.totals_of(strip)), places)
        else:
            repeat(builder, count, take_part)

    def totals_of(self, strip):
        return [load(self.builder, place, FLOATS) for place in strip.places]

    def part(self, strip, number, totals):
        """Return totals with a part's sums."""
        builder = self.builder
        kind = self.kind
        rows = part_rows(builder, number, kind.part_k * kind.operand_bytes, self.parts, *self.starts)
        part = Part(number, times(builder, number, self.turns), *rows)
        first_sums = [_first_sum(builder, kind, self.integer, s_row) for s_row in part.s_rows]
        start = [first for first in first_sums for _ in range(self.vectors)]
        sums = repeat(builder, self.turns, lambda i, sums: self.turn(strip, part, i, sums), start)
        sums = [self.integer.finish(builder, total) for total in sums]
        w_scales = at(builder, self.b_scales, number, WEIGHT_SCALES_BYTES)
        w_scales = at(builder, w_scales, strip.number, self.vectors * LANES * 2)
        half = builder.urem(number, I64(self.parts))
        totals = totals or self.totals_of(strip)
        fold = _fold_int8 if kind is INT8 else _fold_int4
        return fold(builder, self.vectors, part.s_rows, half, w_scales, sums, totals)

    def turn(self, strip, part, i, sums):
        builder = self.builder
        number = builder.add(part.first_turn, i)
        asked = at(builder, times(builder, number, self.strips), strip.number)
        lines = ROW_BYTES // LINE_BYTES * self.together // (self.kind.expansion // self.per_load)
        ask_part_ahead(builder, *self.prefetching, asked, lines, self.strips)
        b_row = at(builder, builder.add(self.b, strip.columns), number, self.together * ROW_BYTES)
        a_first = times(builder, i, 4 * self.per_load * self.together)
        for row in range(self.together):
            sums = self.row(part, at(builder, b_row, row, ROW_BYTES), a_first, row * self.per_load, sums)
        return sums

    def row(self, part, b_row, a_first, done, sums):
        """Return the sums with a row of B. a_first: bytes of A before the turn; done: steps of it before the row."""
        builder = self.builder
        b_k = [load(builder, at(builder, b_row, v, VECTOR_BYTES), INTS, 64) for v in range(self.vectors)]
        is_packed = self.per_load > 1
        steps = [unpacked(builder, vector, self.kind) if is_packed else [vector] for vector in b_k]
        for j in range(self.per_load):
            k = at(builder, a_first, 4 * (done + j))
            before = iter(sums)
            sums = []
            for a_row in part.a_rows:
                a_k = load_to_lanes(builder, builder.add(a_row, k), I32)
                sums += [self.integer.multiply(builder, a_k, step[j], next(before)) for step in steps]
        return sums


def _strip_of(rows: int) -> tuple[int, bool]:
    strips = (
        (4, 2) if rows > 1 and TARGET.splits_vectors else (4,)
    )  # B of one row comes from memory: no jumps
    both = next((strip for strip in strips if has_room((2 * rows + 1) * strip)), 0)
    return (both, True) if both else (strip_of(rows), False)


def _first_sum(builder, kind: Grouped, integer, s_row):
    if kind is INT4:
        return integer.sums(None)
    return load_to_lanes(builder, at(builder, s_row, 4), I32)


def _fold_int8(builder, strip, s_rows, half, w_scales, sums, totals):
    scales = [load_to_lanes(builder, s, F32) for s in s_rows]
    return [
        multiply_add(builder, builder.sitofp(total, FLOATS), scales[i // strip], totals[i])
        for i, total in enumerate(sums)
    ]


def _fold_int4(builder, strip, s_rows, half, w_scales, sums, totals):
    places = [at(builder, w_scales, v, 2 * LANES) for v in range(strip)]
    w_scale = [_load_widened(builder, place) for place in places]
    w_offset = [_load_widened(builder, at(builder, place, 2 * OUT_TILE)) for place in places]
    part = at(builder, times(builder, half, 4), 8)
    scales = [load_to_lanes(builder, s, F32) for s in s_rows]
    a_sums = [load_to_lanes(builder, builder.add(s, part), F32) for s in s_rows]
    new = []
    for i, total in enumerate(sums):
        r, v = divmod(i, strip)
        scaled = builder.fmul(builder.sitofp(total, FLOATS), scales[r])
        without_offset = multiply_add(builder, scaled, w_scale[v], totals[i])
        new.append(multiply_add(builder, a_sums[r], w_offset[v], without_offset))
    return new


def _load_widened(builder, address):
    halves = load(builder, address, ir.VectorType(I16, LANES), 32)
    bits = builder.shl(builder.zext(halves, INTS), splat(INTS, 16))
    return builder.bitcast(bits, FLOATS)


def make_expand(kind: Grouped):
    """Return the intrinsic expand(source, groups, target): a panel's groups as several rows multiply them."""
    together = ROWS_TOGETHER if kind is INT8 and kind.is_neon else 1

    def expand_vectors(builder, vectors):
        if kind.is_neon:
            return expand_lanes(builder, vectors, kind)
        return unpacked(builder, *vectors, kind)

    @emits("void", "intp", "intp", "intp")
    def expand(builder, source, groups, target):
        def place(start, row, j: int, v: int):
            return at(builder, at(builder, start, row, ROW_BYTES), j * ROW_BYTES + v * VECTOR_BYTES)

        def expand_rows(i, _):
            before = times(builder, i, together)
            first = times(builder, before, kind.expansion)
            for v in range(PANEL_VECTORS):
                vectors = [load(builder, place(source, before, j, v), INTS, 64) for j in range(together)]
                for j, part in enumerate(expand_vectors(builder, vectors)):
                    store(builder, part, place(target, first, j, v), 64)

        repeat(builder, times(builder, groups, kind.group_bytes // ROW_BYTES // together), expand_rows)

    return expand


# Module-level names, see tiles.py.
tile_int8 = make_grouped_tile(INT8)
unpacking_int8 = make_grouped_tile(INT8, unpacks=True)
expand_int8 = make_expand(INT8)
tile_int4 = make_grouped_tile(INT4)
expand_int4 = make_expand(INT4)
