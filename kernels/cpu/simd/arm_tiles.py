"""Tiles for ARM: the chains of tiles.py and the sums of grouped_tiles.py, in registers of 16 bytes.

A register of A is multiplied lane by lane. A `quad` is a register of 4 columns of B:

    B            B is taken as         a register of A is        a step adds, in each of 4 columns
    float32      it lies               4 float32: 4 steps        a product, fused
    bfloat16     it lies               2 bfloat16: a step        two products, fused in turn                  BFMLAL
                 float32               4 float32: 2 steps        the same                                     WIDENED
    int8, int4   int8                  16 int8: 4 steps          four products, in int32                      SDOT
                 uint8, 2 columns      2 rows of 8 int8          eight products, in each of 2 rows            USMMLA

usmmla multiplies two rows by two columns, 8 values of K; sdot and usdot multiply by a lane of A.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from llvmlite import ir

from .products import INT4, INT8, STEPS, BFloat, Grouped, to_floats
from .targets import BFMLAL, SDOT, TARGET, USMMLA
from .vector_ir import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    PANEL_VECTORS,
    ROW_BYTES,
    SCALE_GROUP,
    VECTOR_BYTES,
    WEIGHT_SCALES_BYTES,
    ask_part_ahead,
    ask_row_ahead,
    at,
    broadcast,
    declare,
    load,
    part_rows,
    repeat,
    rows_at,
    shuffle,
    splat,
    store,
    store_each,
    times,
)

REGISTER_BYTES = 16
QUAD = 4  # columns
FLOAT_QUAD, INT_QUAD, BYTES, BFLOATS = (
    ir.VectorType(kind, REGISTER_BYTES // size) for kind, size in ((F32, 4), (I32, 4), (I8, 1), (BFloat(), 2))
)


class LaneStep(NamedTuple):
    bytes: int  # of a row of A
    register: ir.VectorType  # of A
    # Steps that a register of A serves. LLVM would broadcast a single float32 as it loads it.
    together: int
    # (builder, a register of each row, the step in it, a quad, a sum of each row) -> sums
    multiply: Callable
    quad: ir.VectorType = INT_QUAD  # of B, as it is loaded


def lane(builder, register, i: int):
    return shuffle(builder, [i] * register.type.count, register)


def four(builder, register, i: int):
    """Return the i-th 4 bytes of 16 in all lanes."""
    return builder.bitcast(lane(builder, builder.bitcast(register, INT_QUAD), i), BYTES)


def fma(builder, x, y, z):
    return builder.call(declare(builder, "llvm.fma.v4f32", FLOAT_QUAD, [FLOAT_QUAD] * 3), [x, y, z])


def _multiply_floats(builder, rows, j, quad, sums, element=F32):
    quad = to_floats(builder, quad, element)
    return [fma(builder, quad, lane(builder, row, j), total) for row, total in zip(rows, sums, strict=True)]


def _multiply_widened(builder, rows, j, quad, sums):
    high = builder.and_(quad, splat(INT_QUAD, 0xFFFF0000))
    low = builder.shl(quad, splat(INT_QUAD, 16))
    sums = _multiply_floats(builder, rows, 2 * j + 1, high, sums)
    return _multiply_floats(builder, rows, 2 * j, low, sums)


def _multiply_longs(builder, rows, j, quad, sums):
    quad = builder.bitcast(quad, BFLOATS)
    for i, name in ((2 * j + 1, "bfmlalt"), (2 * j, "bfmlalb")):  # high half first: the chain's order
        function = declare(builder, f"llvm.aarch64.neon.{name}", FLOAT_QUAD, [FLOAT_QUAD, BFLOATS, BFLOATS])
        sums = [
            builder.call(function, [total, quad, lane(builder, row, i)])
            for row, total in zip(rows, sums, strict=True)
        ]
    return sums


LONG_STEP = LaneStep(4, BFLOATS, 1, _multiply_longs)
WIDENED_STEP = LaneStep(8, FLOAT_QUAD, 2, _multiply_widened)
PAIR_STEP = LONG_STEP if TARGET.bfloat16 == BFMLAL else WIDENED_STEP


def lane_step(dtype) -> LaneStep:
    """Return the step by the dtype of the array that holds B."""
    if dtype == "uint16":
        return PAIR_STEP
    step = STEPS[dtype]
    return LaneStep(4, FLOAT_QUAD, 4, partial(_multiply_floats, element=step.element), step.vector(QUAD))


def add_dot(builder, total, quad, a, is_signed: bool):
    """Add four products to each of 4 sums: a quad's bytes by 4 signed bytes of A."""
    function = declare(
        builder,
        f"llvm.aarch64.neon.{'sdot' if is_signed else 'usdot'}.v4i32.v16i8",
        INT_QUAD,
        [INT_QUAD, BYTES, BYTES],
    )
    return builder.call(function, [total, builder.bitcast(quad, BYTES), a])


def add_matrix(builder, total, columns, rows):
    """Add eight products to each of 4 sums: column 0 by rows 0 and 1, then column 1."""
    function = declare(builder, "llvm.aarch64.neon.usmmla.v4i32.v16i8", INT_QUAD, [INT_QUAD, BYTES, BYTES])
    return builder.call(function, [total, builder.bitcast(columns, BYTES), builder.bitcast(rows, BYTES)])


def load_register(builder, address, kind, size: int = REGISTER_BYTES):
    """Load 16 bytes, or the first 4 or 8 of a register."""
    if size == REGISTER_BYTES:
        return load(builder, address, kind)
    number = ir.IntType(8 * size)
    start = ir.VectorType(number, REGISTER_BYTES // size)(ir.Undefined)
    value = load(builder, address, number)
    return builder.bitcast(builder.insert_element(start, value, I32(0)), kind)


def load_quad(builder, row, number: int, kind=INT_QUAD):
    size = QUAD * kind.element.width // 8
    return load(builder, at(builder, row, number, size), kind, size)


def repeat_any(builder, count, body, initial):
    before = builder.block
    some = builder.append_basic_block("some")
    done = builder.append_basic_block("none_left")
    builder.cbranch(builder.icmp_signed(">", count, count.type(0)), some, done)
    builder.position_at_end(some)
    new = repeat(builder, count, body, initial)
    after = builder.block
    builder.branch(done)
    builder.position_at_end(done)
    phis = [builder.phi(value.type) for value in initial]
    for phi, first, last in zip(phis, initial, new, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(last, after)
    return phis


QUADS = VECTOR_BYTES // REGISTER_BYTES  # of a vector of 16 lanes


def strip_of_lanes(rows: int, vectors: int = PANEL_VECTORS) -> int:
    strips = (strip for strip in (4, 3, 2, 1) if vectors % strip == 0)
    return next(strip for strip in strips if rows * (strip * QUADS + 1) + 2 <= TARGET.registers)


def make_lane_code(vectors: int, adds: bool, wide: int, step: LaneStep):
    def code(builder, rows: int, a, lda, b, ldb, steps, c, ldc, ahead, spacing):
        strip = strip_of_lanes(rows, vectors)
        together = step.together
        quads = range(strip * QUADS)
        vector_bytes = LANES * step.quad.element.width // 8
        lines = wide * vector_bytes // VECTOR_BYTES
        a_starts = rows_at(builder, a, lda, rows)
        c_starts = rows_at(builder, c, ldc, rows)

        def take_strip(number, _):
            columns = times(builder, number, strip * VECTOR_BYTES)
            b_strip = at(builder, b, number, strip * vector_bytes)

            def take(k, count: int, sums):
                a_k = times(builder, k, step.bytes)
                a_places = [builder.add(start, a_k) for start in a_starts]
                a_rows = [
                    load_register(builder, place, step.register, count * step.bytes) for place in a_places
                ]
                for j in range(count):
                    k_j = at(builder, k, j)
                    ask_row_ahead(builder, ahead, spacing, k_j, number, strip, vectors, lines, wide)
                    b_row = builder.add(b_strip, builder.mul(k_j, ldb))
                    new = []
                    for q in quads:
                        quad = load_quad(builder, b_row, q, step.quad)
                        new += step.multiply(builder, a_rows, j, quad, sums[q * rows : (q + 1) * rows])
                    sums = new
                return sums

            places = [
                at(builder, builder.add(row, columns), q, REGISTER_BYTES) for q in quads for row in c_starts
            ]
            sums = [load(builder, place, FLOAT_QUAD) if adds else FLOAT_QUAD(None) for place in places]
            done = I64(0)
            if together > 1:
                whole = builder.udiv(steps, I64(together))
                done = times(builder, whole, together)
                sums = repeat_any(
                    builder, whole, lambda i, s: take(times(builder, i, together), together, s), sums
                )
            rest = builder.sub(steps, done)
            sums = repeat_any(builder, rest, lambda i, s: take(builder.add(done, i), 1, s), sums)
            store_each(builder, sums, places)

        repeat(builder, vectors // strip, take_strip)

    return code


STEP_K = 4  # values of K in a row of a panel, and in a lane of A
REGISTER_STEPS = REGISTER_BYTES // STEP_K
# Rows of an int8 panel expanded together: two make the registers of two columns.
ROWS_TOGETHER = 2 if TARGET.int8 == USMMLA else 1


def expand_lanes(builder, rows, kind: Grouped):
    """Return rows' vectors of 16 columns as several rows of A multiply them."""
    if kind is INT4:
        rows = _nibbles(builder, *rows)
    elif TARGET.int8 == SDOT:
        return [_signed(builder, *rows)]
    return _two_columns(builder, *rows) if TARGET.int8 == USMMLA else rows


def _two_columns(builder, first, second):
    """Return two steps with the 8 bytes of a column side by side."""
    half = LANES // 2
    masks = ([place for i in range(start, start + half) for place in (i, LANES + i)] for start in (0, half))
    return [shuffle(builder, mask, first, second) for mask in masks]


def _signed(builder, weights):
    return builder.xor(weights, splat(weights.type, 0x80808080))


def _nibbles(builder, weights):
    eights = ir.VectorType(I8, 4 * weights.type.count)
    both = builder.bitcast(weights, eights)
    four_bits = splat(eights, 4)
    low = splat(eights, 15)
    parts = builder.and_(both, low), builder.lshr(both, four_bits)
    return [builder.bitcast(part, weights.type) for part in parts]


def make_lane_grouped_code(kind: Grouped):
    part_k = kind.part_k
    parts = SCALE_GROUP // part_k
    fold = _fold_int8 if kind is INT8 else _fold_int4

    def code(builder, rows: int, a, lda, scales, lds, b, b_scales, groups, c, ahead, spacing):
        by_twos = TARGET.int8 == USMMLA and rows > 1
        multiply = _matrices if by_twos else _dots
        strip = strip_of_lanes(rows + rows % 2 if by_twos else rows)
        lone_int4 = kind is INT4 and rows == 1
        strips = PANEL_VECTORS // strip
        panel_rows = part_k // STEP_K // (2 if lone_int4 else 1)  # of the panel
        lines = PANEL_VECTORS // (2 if kind is INT4 and rows > 1 else 1)  # that a row asks for

        a_starts = rows_at(builder, a, lda, rows)
        s_starts = rows_at(builder, scales, lds, rows)
        c_rows = [at(builder, c, r, ROW_BYTES) for r in range(rows)]

        def take_part(number, _):
            a_rows, s_rows = part_rows(builder, number, part_k, parts, a_starts, s_starts)
            first_row = times(builder, number, panel_rows)
            b_part = at(builder, b, first_row, ROW_BYTES)

            def take_strip(strip_number, _):
                columns = times(builder, strip_number, strip * VECTOR_BYTES)
                b_strip = builder.add(b_part, columns)

                def row_at(row):
                    before = at(builder, times(builder, builder.add(first_row, row), strips), strip_number)
                    ask_part_ahead(builder, ahead, spacing, before, lines, strips)
                    return at(builder, b_strip, row, ROW_BYTES)

                sums = multiply(builder, kind, strip * QUADS, a_rows, s_rows, row_at)
                w_scales = at(builder, b_scales, number, WEIGHT_SCALES_BYTES)
                w_scales = at(builder, w_scales, strip_number, strip * LANES * 2)
                c_strips = [builder.add(c_row, columns) for c_row in c_rows]
                fold(builder, sums, c_strips, s_rows, builder.urem(number, I64(parts)), w_scales)

            repeat(builder, strips, take_strip)

        repeat(builder, times(builder, groups, parts), take_part)

    return code


def _dots(builder, kind, quads: int, a_rows, s_rows, row_at):
    rows = len(a_rows)
    is_signed = TARGET.int8 == SDOT
    per_load = 2 if kind is INT4 and rows == 1 else 1  # steps that a quad as it lies holds
    loads = REGISTER_STEPS // per_load

    def take(quad):
        if rows > 1 or (kind is INT8 and not is_signed):
            return [quad]
        return _nibbles(builder, quad) if kind is INT4 else [_signed(builder, quad)]

    def step(i, sums):
        registers = [load_register(builder, at(builder, start, i, REGISTER_BYTES), BYTES) for start in a_rows]
        for n in range(loads):
            b_row = row_at(at(builder, times(builder, i, loads), n))
            new = []
            for q in range(quads):
                quad = load_quad(builder, b_row, q)
                totals = sums[q * rows : (q + 1) * rows]
                for j, taken in enumerate(take(quad), n * per_load):
                    totals = [
                        add_dot(builder, total, taken, four(builder, register, j), is_signed)
                        for total, register in zip(totals, registers, strict=True)
                    ]
                new += totals
            sums = new
        return sums

    start = [INT_QUAD(None)] * rows
    if kind is INT8 and not is_signed:
        start = [broadcast(builder, value, QUAD) for value in _first_sums(builder, s_rows)]
    sums = repeat(builder, kind.part_k // STEP_K // REGISTER_STEPS, step, start * quads)
    return [sums[q * rows : (q + 1) * rows] for q in range(quads)]


def _first_sums(builder, s_rows):
    return [load(builder, at(builder, s, 4), I32) for s in s_rows]


def _matrices(builder, kind, quads: int, a_rows, s_rows, row_at):
    pairs = [(r, min(r + 1, len(a_rows) - 1)) for r in range(0, len(a_rows), 2)]
    count = len(pairs)
    longs = ir.VectorType(I64, 2)

    def step(i, sums):
        registers = [load_register(builder, at(builder, start, i, REGISTER_BYTES), longs) for start in a_rows]
        for j in range(2):
            both = [
                shuffle(builder, [j, 2 + j], registers[first], registers[second]) for first, second in pairs
            ]
            row = at(builder, times(builder, i, 4), 2 * j)
            b_rows = [row_at(row), row_at(at(builder, row, 1))]
            new = []
            for n in range(2 * quads):  # registers of two columns, in the order of _two_columns
                vector, place = divmod(n, 2 * QUADS)
                half, place = divmod(place, QUADS)
                columns = load_quad(builder, b_rows[half], vector * QUADS + place)
                totals = sums[n * count : (n + 1) * count]
                new += [
                    add_matrix(builder, total, columns, pair)
                    for total, pair in zip(totals, both, strict=True)
                ]
            sums = new
        return sums

    start = [INT_QUAD(None)] * count
    if kind is INT8:
        firsts = _first_sums(builder, s_rows)
        start = [_alternating(builder, firsts[first], firsts[second]) for first, second in pairs]
    sums = repeat(builder, kind.part_k // STEP_K // REGISTER_STEPS, step, start * (2 * quads))
    return [_rows_of(builder, sums[2 * q * count : 2 * (q + 1) * count], len(a_rows)) for q in range(quads)]


def _alternating(builder, first, second):
    both = (broadcast(builder, value, QUAD) for value in (first, second))
    return shuffle(builder, [0, QUAD, 0, QUAD], *both)


def _rows_of(builder, sums, rows: int):
    pairs = len(sums) // 2
    c_rows = [
        shuffle(builder, range(second, 2 * QUAD, 2), sums[p], sums[pairs + p])
        for p in range(pairs)
        for second in (0, 1)
    ]
    return c_rows[:rows]


def _fold_int8(builder, sums, c_rows, s_rows, half, w_scales) -> None:
    for r, (c_row, s_row) in enumerate(zip(c_rows, s_rows, strict=True)):
        scale = lane(builder, load_register(builder, s_row, FLOAT_QUAD), 0)
        places = [at(builder, c_row, q, REGISTER_BYTES) for q in range(len(sums))]
        totals = [load(builder, place, FLOAT_QUAD) for place in places]
        for q, place in enumerate(places):
            store(builder, fma(builder, builder.sitofp(sums[q][r], FLOAT_QUAD), scale, totals[q]), place)


def _fold_int4(builder, sums, c_rows, s_rows, half, w_scales) -> None:
    part = at(builder, times(builder, half, 4), 4)
    for q, quad_sums in enumerate(sums):
        w_quad = at(builder, w_scales, q, QUAD * 2)
        w_scale = _load_widened(builder, w_quad)
        w_offset = _load_widened(builder, at(builder, w_quad, WEIGHT_SCALES_BYTES // 2))
        places = [at(builder, c_row, q, REGISTER_BYTES) for c_row in c_rows]
        totals = [load(builder, place, FLOAT_QUAD) for place in places]
        for place, total, so_far, s_row in zip(places, quad_sums, totals, s_rows, strict=True):
            scale = lane(builder, load_register(builder, s_row, FLOAT_QUAD), 0)
            # The second of two numbers: LLVM would broadcast a single number as it loads it.
            a_sum = lane(builder, load_register(builder, builder.add(s_row, part), FLOAT_QUAD, 8), 1)
            scaled = builder.fmul(builder.sitofp(total, FLOAT_QUAD), scale)
            store(builder, fma(builder, w_offset, a_sum, fma(builder, scaled, w_scale, so_far)), place)


def _load_widened(builder, address):
    halves = load(builder, address, ir.VectorType(I16, QUAD), 8)
    return builder.bitcast(builder.shl(builder.zext(halves, INT_QUAD), splat(INT_QUAD, 16)), FLOAT_QUAD)
