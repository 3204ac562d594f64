"""Tiles of quantized weights: integers add up over a group of K, exactly, folded to float32 once a group."""

from llvmlite import ir

from .arm_tiles import ROWS_TOGETHER, expand_lanes, make_lane_grouped_code
from .products import INT4, INT8, INTEGER_STEPS, Grouped, has_room, strip_of, unpacked
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
    code = make_lane_grouped_code(kind) if kind.is_neon else _make_code(kind, unpacks)

    @emits("void", *["intp"] * 11)
    def tile(builder, rows, a, lda, scales, lds, b, b_scales, groups, c, ahead, spacing):
        for_each_height(builder, code, rows, a, lda, scales, lds, b, b_scales, groups, c, ahead, spacing)

    return tile


def _make_code(kind: Grouped, unpacks: bool):
    integer = INTEGER_STEPS[kind.product]
    part_k = kind.part_k
    parts = SCALE_GROUP // part_k
    fold = _fold_int8 if kind is INT8 else _fold_int4

    def code(builder, rows, a, lda, scales, lds, b, b_scales, groups, c, ahead, spacing):
        strip, keeps_totals = _strip_of(rows)
        per_load = kind.expansion if rows == 1 or unpacks else 1  # steps that a load serves
        together = ROWS_IN_TURN if strip == 1 else 1  # rows of B that a turn of the loop takes
        turns = part_k // integer.k // per_load // together
        strips = PANEL_VECTORS // strip
        lines = ROW_BYTES // LINE_BYTES * together // (kind.expansion // per_load)
        a_starts = rows_at(builder, a, lda, rows)
        s_starts = rows_at(builder, scales, lds, rows)
        c_rows = [at(builder, c, r, ROW_BYTES) for r in range(rows)]

        def take_parts(strip_number, first_part, count):
            columns = times(builder, strip_number, strip * VECTOR_BYTES)
            c_strips = [builder.add(c_row, columns) for c_row in c_rows]
            places = [at(builder, start, v, VECTOR_BYTES) for start in c_strips for v in range(strip)]

            def take_part(part, totals):
                number = builder.add(first_part, part)
                starts = a_starts, s_starts
                a_rows, s_rows = part_rows(builder, number, part_k * kind.operand_bytes, parts, *starts)
                first_turn = times(builder, number, turns)

                def turn(i, sums):
                    before = builder.add(first_turn, i)
                    asked = at(builder, times(builder, before, strips), strip_number)
                    ask_part_ahead(builder, ahead, spacing, asked, lines, strips)
                    b_row = at(builder, builder.add(b, columns), before, together * ROW_BYTES)
                    a_first = times(builder, i, 4 * per_load * together)
                    for row in range(together):
                        sums = take_row(at(builder, b_row, row, ROW_BYTES), a_first, row * per_load, sums)
                    return sums

                def take_row(b_row, a_first, done, sums):
                    b_k = [load(builder, at(builder, b_row, v, VECTOR_BYTES), INTS, 64) for v in range(strip)]
                    taken = [unpacked(builder, vector, kind) if per_load > 1 else [vector] for vector in b_k]
                    for j in range(per_load):
                        k, new = at(builder, a_first, 4 * (done + j)), []
                        for r in range(rows):
                            a_k = load_to_lanes(builder, builder.add(a_rows[r], k), I32)
                            new += [
                                integer.multiply(builder, a_k, taken[v][j], sums[r * strip + v])
                                for v in range(strip)
                            ]
                        sums = new
                    return sums

                start = [first for s in s_rows for first in [_first_sum(builder, kind, integer, s)] * strip]
                sums = [integer.finish(builder, total) for total in repeat(builder, turns, turn, start)]
                w_scales = at(builder, b_scales, number, WEIGHT_SCALES_BYTES)
                w_scales = at(builder, w_scales, strip_number, strip * LANES * 2)
                half = builder.urem(number, I64(parts))
                totals = totals or get_totals()
                totals = fold(builder, strip, s_rows, half, w_scales, sums, totals)
                if keeps_totals:
                    return totals
                store_each(builder, totals, places)

            def get_totals():
                return [load(builder, place, FLOATS) for place in places]

            totals = repeat(builder, count, take_part, get_totals() if keeps_totals else [])
            store_each(builder, totals, places if keeps_totals else [])

        def take_strips(first_part, count):
            repeat(builder, strips, lambda strip_number, _: take_parts(strip_number, first_part, count))

        every = times(builder, groups, parts)
        if keeps_totals:
            take_strips(I64(0), every)
        else:
            repeat(builder, every, lambda part, _: take_strips(part, 1))

    return code


def _strip_of(rows: int) -> tuple[int, bool]:
    strips = (4, 2) if rows > 1 else (4,)  # B comes from memory: one row should not jump
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
