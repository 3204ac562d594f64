"""Tiles of quantized weights: integers add up over a group of K, exactly, folded to float32 once a group."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tinygpt.kernels.cpu.simd.arm_tiles import ROWS_TOGETHER, expand_lanes, make_lane_grouped_code, takes_lanes
from tinygpt.kernels.cpu.simd.panels import (
    PANEL_VECTORS,
    ROW_BYTES,
    SCALE_GROUP,
    SCALES_BYTES,
    WEIGHT_GROUP,
    WEIGHT_SCALES_BYTES,
    ask_part_ahead,
)
from tinygpt.kernels.cpu.simd.steps import INTEGER_STEPS, expansion, has_room, step_name, strip_of, unpacked
from tinygpt.kernels.cpu.simd.targets import SHORTS
from tinygpt.kernels.cpu.simd.tiles import LINE_BYTES, OUT_TILE, for_each_height
from tinygpt.kernels.cpu.simd.vector_ir import (
    F32,
    FLOATS,
    I16,
    I32,
    INTS,
    LANES,
    VECTOR_BYTES,
    broadcast,
    load,
    multiply_add,
    repeat,
    store,
)

GROUP_BYTES = {"int8": SCALE_GROUP * OUT_TILE, "int4": SCALE_GROUP * OUT_TILE // 2}  # of a panel
OPERAND_BYTES = {dtype: 2 if step_name(dtype) == SHORTS else 1 for dtype in GROUP_BYTES}  # of an activation
EXPANSION = {dtype: expansion(dtype) for dtype in GROUP_BYTES}  # of a panel, as the steps multiply it
EXPANDS = {dtype: size > 1 or takes_lanes(dtype) for dtype, size in EXPANSION.items()}  # or it lies otherwise

# Rows of B in a turn of the loop of a tile with one vector of columns. One and four are slower.
ROWS_IN_TURN = 2


def make_grouped_tile(dtype: str):
    """Return the intrinsic tile(rows, a, lda, scales, lds, b, b_scales, groups, c, ahead, spacing): C += A @ B.

    Addresses, byte strides; C is (rows, OUT_TILE). a: OPERAND_BYTES each; scales: see Int8Operand.
    b, int8: weights + 128; sums start at -128 sum(a), and the caller applies columns' scales.
    b, int4: weights 0..15, two steps a byte; b_scales: bfloat16 scales and offsets of each WEIGHT_GROUP.
    Several rows take b expanded by make_expand. Prefetches as make_tile.
    """
    code = make_lane_grouped_code(dtype) if takes_lanes(dtype) else _make_code(dtype)

    @intrinsic
    def tile(typingctx, rows, a, lda, scales, lds, b, b_scales, groups, c, ahead, spacing):
        def codegen(context, builder, signature, args):
            for_each_height(builder, code, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 11), codegen

    return tile


def _make_code(dtype: str):
    integer, part_k = INTEGER_STEPS[step_name(dtype)], {"int8": SCALE_GROUP, "int4": WEIGHT_GROUP}[dtype]
    parts, fold = SCALE_GROUP // part_k, {"int8": _fold_int8, "int4": _fold_int4}[dtype]

    def code(builder, rows, a, lda, scales, lds, b, b_scales, groups, c, ahead, spacing):
        strip, keeps_totals = _strip_of(rows)
        per_load = EXPANSION[dtype] if rows == 1 else 1  # steps that a load serves
        together = ROWS_IN_TURN if strip == 1 else 1  # rows of B that a turn of the loop takes
        turns, strips = part_k // integer.k // per_load // together, PANEL_VECTORS // strip
        lines = ROW_BYTES // LINE_BYTES * together // (EXPANSION[dtype] // per_load)

        def size(n: int):
            return ir.Constant(a.type, n)

        def starts(first, stride):
            return [builder.add(first, builder.mul(stride, size(r))) for r in range(rows)]

        a_starts, s_starts, c_rows = starts(a, lda), starts(scales, lds), starts(c, size(ROW_BYTES))

        def take_parts(strip_number, first_part, count):
            columns = builder.mul(strip_number, size(strip * VECTOR_BYTES))
            c_starts = [builder.add(c_row, columns) for c_row in c_rows]
            places = [builder.add(start, size(v * VECTOR_BYTES)) for start in c_starts for v in range(strip)]

            def take_part(part, totals):
                number = builder.add(first_part, part)
                a_offset = builder.mul(number, size(part_k * OPERAND_BYTES[dtype]))
                s_offset = builder.mul(builder.udiv(number, size(parts)), size(SCALES_BYTES))
                a_rows = [builder.add(start, a_offset) for start in a_starts]
                s_rows = [builder.add(start, s_offset) for start in s_starts]
                first_turn = builder.mul(number, size(turns))

                def turn(i, sums):
                    before = builder.add(first_turn, i)
                    asked = builder.add(builder.mul(before, size(strips)), strip_number)
                    ask_part_ahead(builder, ahead, spacing, asked, lines, strips)
                    b_row = builder.add(builder.add(b, columns), builder.mul(before, size(together * ROW_BYTES)))
                    a_first = builder.mul(i, size(4 * per_load * together))
                    for row in range(together):
                        sums = take_row(builder.add(b_row, size(row * ROW_BYTES)), a_first, row * per_load, sums)
                    return sums

                def take_row(b_row, a_first, done, sums):
                    b_k = [load(builder, builder.add(b_row, size(v * VECTOR_BYTES)), INTS, 64) for v in range(strip)]
                    taken = [unpacked(builder, vector, dtype) if per_load > 1 else [vector] for vector in b_k]
                    for j in range(per_load):
                        k, new = builder.add(a_first, size(4 * (done + j))), []
                        for r in range(rows):
                            a_k = broadcast(builder, load(builder, builder.add(a_rows[r], k), I32, 4))
                            new += [
                                integer.multiply(builder, a_k, taken[v][j], sums[r * strip + v]) for v in range(strip)
                            ]
                        sums = new
                    return sums

                start = [first for s in s_rows for first in [_first_sum(builder, dtype, integer, s)] * strip]
                sums = [integer.finish(builder, total) for total in repeat(builder, size(turns), turn, start)]
                w_scales = builder.add(
                    builder.add(b_scales, builder.mul(number, size(WEIGHT_SCALES_BYTES))),
                    builder.mul(strip_number, size(strip * LANES * 2)),
                )
                half = builder.urem(number, size(parts))
                if keeps_totals:
                    return fold(builder, strip, s_rows, half, w_scales, sums, totals)
                put_totals(fold(builder, strip, s_rows, half, w_scales, sums, get_totals()))
                return []

            def get_totals():
                return [load(builder, at, FLOATS, 4) for at in places]

            def put_totals(totals):
                for at, total in zip(places, totals, strict=True):
                    store(builder, total, at, 4)

            if keeps_totals:
                put_totals(repeat(builder, count, take_part, get_totals()))
            else:
                repeat(builder, count, take_part, [])
            return []

        def take_strips(part, _):
            return repeat(builder, size(strips), lambda strip_number, _: take_parts(strip_number, part, size(1)), [])

        every = builder.mul(groups, size(parts))
        if keeps_totals:
            repeat(builder, size(strips), lambda strip_number, _: take_parts(strip_number, size(0), every), [])
        else:
            repeat(builder, every, take_strips, [])

    return code


def _strip_of(rows: int) -> tuple[int, bool]:
    strips = (4, 2) if rows > 1 else (4,)  # B comes from memory: one row should not jump
    both = next((strip for strip in strips if has_room((2 * rows + 1) * strip)), 0)
    return (both, True) if both else (strip_of(rows), False)


def _first_sum(builder, dtype: str, integer, s_row):
    if dtype == "int4":
        return ir.Constant(integer.sums, None)
    return broadcast(builder, load(builder, builder.add(s_row, ir.Constant(s_row.type, 4)), I32, 4))


def _fold_int8(builder, strip, s_rows, half, w_scales, sums, totals):
    scales = [broadcast(builder, load(builder, s, F32, 4)) for s in s_rows]
    return [
        multiply_add(builder, builder.sitofp(total, FLOATS), scales[i // strip], totals[i])
        for i, total in enumerate(sums)
    ]


def _fold_int4(builder, strip, s_rows, half, w_scales, sums, totals):
    def size(n: int):
        return ir.Constant(half.type, n)

    places = [builder.add(w_scales, size(2 * v * LANES)) for v in range(strip)]
    w_scale = [_load_widened(builder, at) for at in places]
    w_offset = [_load_widened(builder, builder.add(at, size(2 * OUT_TILE))) for at in places]
    part = builder.add(builder.mul(half, size(4)), size(8))
    scales = [broadcast(builder, load(builder, s, F32, 4)) for s in s_rows]
    a_sums = [broadcast(builder, load(builder, builder.add(s, part), F32, 4)) for s in s_rows]
    new = []
    for i, total in enumerate(sums):
        r, v = divmod(i, strip)
        scaled = builder.fmul(builder.sitofp(total, FLOATS), scales[r])
        without_offset = multiply_add(builder, scaled, w_scale[v], totals[i])
        new.append(multiply_add(builder, a_sums[r], w_offset[v], without_offset))
    return new


def _load_widened(builder, address):
    halves = load(builder, address, ir.VectorType(I16, LANES), 32)
    bits = builder.shl(builder.zext(halves, INTS), ir.Constant(INTS, [16] * LANES))
    return builder.bitcast(bits, FLOATS)


def make_expand(dtype: str):
    """Return the intrinsic expand(source, groups, target): a panel's groups as several rows multiply them."""
    together = ROWS_TOGETHER[dtype] if takes_lanes(dtype) else 1

    def expand_vectors(builder, vectors):
        if takes_lanes(dtype):
            return expand_lanes(builder, vectors, dtype)
        return unpacked(builder, *vectors, dtype)

    @intrinsic
    def expand(typingctx, source, groups, target):
        def codegen(context, builder, signature, args):
            source, groups, target = args

            def at(start, row, offset: int):
                place = builder.mul(row, ir.Constant(row.type, ROW_BYTES))
                return builder.add(builder.add(start, place), ir.Constant(row.type, offset))

            def expand_rows(i, _):
                before = builder.mul(i, ir.Constant(i.type, together))
                first = builder.mul(before, ir.Constant(i.type, EXPANSION[dtype]))
                for v in range(PANEL_VECTORS):
                    places = [at(source, before, row * ROW_BYTES + v * VECTOR_BYTES) for row in range(together)]
                    vectors = [load(builder, place, INTS, 64) for place in places]
                    for j, part in enumerate(expand_vectors(builder, vectors)):
                        store(builder, part, at(target, first, j * ROW_BYTES + v * VECTOR_BYTES), 64)
                return []

            rows = ir.Constant(groups.type, GROUP_BYTES[dtype] // ROW_BYTES // together)
            repeat(builder, builder.mul(groups, rows), expand_rows, [])
            return context.get_dummy_value()

        return types.void(*[types.intp] * 3), codegen

    return expand


# Module-level names, see tiles.py.
tile_int8, expand_int8 = make_grouped_tile("int8"), make_expand("int8")
tile_int4, expand_int4 = make_grouped_tile("int4"), make_expand("int4")
