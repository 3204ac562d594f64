"""Micro-kernels as LLVM vector IR in Numba intrinsics, on raw addresses.

A tile multiplies R rows of A by N*16 columns of B, over K in steps, into C (float32). Each output is one chain in the
order of k: a row's bits do not depend on its batch. A step loads N vectors of B and broadcasts 4 bytes of a row of A.
With too few registers for R*N accumulators, a tile goes over its columns in strips.

Over an int8 KV cache a row of A begins with its scale (float32) and the start of its sums (int32), -128 times the sum
of its numbers, as a byte of B is a number + 128. Numbers are int16, or int8 for `vpdpbusd`, with 14-bit weights in two
planes.
"""

from .arm_tiles import lane_step, make_lane_code
from .products import HALF, INTEGER_STEPS, STEPS, Step, shorts_of, strip_of, to_floats
from .targets import TARGET, VPDPBUSD
from .vector_ir import (
    F32,
    FLOATS,
    I32,
    INTS,
    LANES,
    PANEL_VECTORS,
    VECTOR_BYTES,
    ask_ahead,
    ask_row_ahead,
    at,
    emits,
    emits_by_dtype,
    load,
    load_to_lanes,
    multiply_add,
    repeat,
    rows_at,
    splat,
    store,
    store_each,
    times,
)

OUT_TILE = PANEL_VECTORS * LANES
# 6 x 64: 24 accumulators, 4 vectors of B and one of A fill 29 of AVX-512's 32 registers; 6 x 16 fill 15 of AVX2's 16.
ROW_TILE = 6
IN_STRIPS = strip_of(ROW_TILE) < PANEL_VECTORS
# Rows of x of an item, which share a panel in the L2 cache. In strips each block expands the panel's chunks anew.
ROW_BLOCK = (16 if IN_STRIPS else 8) * ROW_TILE
STEP_BYTES = 4  # of a column of B in a step
LINE_BYTES = 64
# Bytes ahead at which B is prefetched: hardware stops at pages of 4 KB, and int4 comes at 26 instead of 47 GB/s.
AHEAD = 4096
CHUNK_BYTES = 24576  # of a panel: stays in the L1 cache for several tiles


def make_tile(vectors: int, adds: bool = True):
    """Return the intrinsic tile(like, rows, a, lda, b, ldb, steps, c, ldc, ahead, spacing): addresses, byte strides.

    C = A @ B, or += if it `adds`; 1 <= rows <= ROW_TILE, steps >= 1. The dtype of `like` is B's: float32, uint16
    (bfloat16 pairs) or uint8 (an int8 KV cache). Each step prefetches `vectors` lines from `ahead`, `spacing` apart.
    """

    @emits_by_dtype(10)
    def tile(builder, dtype, rows, a, lda, b, ldb, steps, c, ldc, ahead, spacing):
        code = make_code(dtype, vectors, adds, vectors)
        for_each_height(builder, code, rows, a, lda, b, ldb, steps, c, ldc, ahead, spacing)

    return tile


@emits_by_dtype(11)
def panel_tile(builder, dtype, rows, vectors, a, lda, b, ldb, steps, c, ldc, ahead, spacing):
    """Compute the first `vectors` vectors of a panel's columns."""

    def take(width: int):
        code = make_code(dtype, width, False, PANEL_VECTORS)
        for_each_height(builder, code, rows, a, lda, b, ldb, steps, c, ldc, ahead, spacing)

    select(builder, vectors, PANEL_VECTORS, take)


def make_code(dtype, vectors: int, adds: bool, wide: int):
    """Return code(builder, rows, a, lda, ...), which emits a tile of the first `vectors` of `wide` vectors."""
    if dtype == "uint8":
        return make_integer_code(vectors, adds, wide)
    if TARGET.is_neon:
        return make_lane_code(vectors, adds, wide, lane_step(dtype))
    return _make_code(vectors, adds, wide, STEPS[dtype])


def _make_code(vectors: int, adds: bool, wide: int, step_of_b: Step):
    vector_bytes = LANES * step_of_b.lane_bytes
    lines = wide * vector_bytes // LINE_BYTES
    kind = step_of_b.vector(LANES)
    halves = step_of_b.halves

    def code(builder, rows: int, a, lda, b, ldb, steps, c, ldc, ahead, spacing):
        strip = strip_of(rows, vectors)
        a_rows = rows_at(builder, a, lda, rows)

        def take_strip(number, _):
            b_strip = at(builder, b, number, strip * vector_bytes)
            c_strip = at(builder, c, number, strip * VECTOR_BYTES)

            def step(k, sums):
                ask_row_ahead(builder, ahead, spacing, k, number, strip, vectors, lines, wide)
                b_row = builder.add(b_strip, builder.mul(k, ldb))
                a_step = times(builder, k, 4 * len(halves))
                b_k = [load(builder, at(builder, b_row, v, vector_bytes), kind, 32) for v in range(strip)]
                for part in halves:
                    taken = [part.take(builder, vector) for vector in b_k]
                    new = []
                    for r in range(rows):
                        a_at = at(builder, builder.add(a_rows[r], a_step), part.a_offset)
                        a_k = load_to_lanes(builder, a_at, I32)
                        new += [
                            part.multiply(builder, a_k, taken[v], sums[r * strip + v]) for v in range(strip)
                        ]
                    sums = new
                return sums

            c_rows = rows_at(builder, c_strip, ldc, rows)
            places = [at(builder, c_row, v, VECTOR_BYTES) for c_row in c_rows for v in range(strip)]
            start = [load(builder, place, FLOATS) if adds else FLOATS(None) for place in places]
            store_each(builder, repeat(builder, steps, step, start), places)

        repeat(builder, vectors // strip, take_strip)

    return code


@emits("void", "intp", "intp", "intp")
def widen_float16(builder, source, steps, target):
    """Write a panel's steps as float32."""

    def take_vector(i, _):
        halves = load(builder, at(builder, source, i, LANES * 2), STEPS["int16"].vector(LANES), 32)
        store(builder, to_floats(builder, halves, HALF), at(builder, target, i, VECTOR_BYTES), VECTOR_BYTES)

    repeat(builder, times(builder, steps, PANEL_VECTORS), take_vector)


def for_each_height(builder, code, rows, *arguments) -> None:
    select(builder, rows, ROW_TILE, lambda n: code(builder, n, *arguments))


def select(builder, number, count: int, emit) -> None:
    """Emit `emit(n)` for n = 1 to `count`, and a jump to n = `number`."""
    done = builder.append_basic_block("done")
    blocks = [builder.append_basic_block(f"case{n}") for n in range(1, count + 1)]
    switch = builder.switch(number, blocks[-1])
    for n, block in enumerate(blocks, 1):
        switch.add_case(number.type(n), block)
        builder.position_at_end(block)
        emit(n)
        builder.branch(done)
    builder.position_at_end(done)


# A cached kernel reaches an intrinsic as a module-level name only.
panel_add = make_tile(PANEL_VECTORS)
strip_add = make_tile(1)


HAS_VPDPBUSD = TARGET.int8_cache == VPDPBUSD
HEADER_BYTES, PLANE_BYTES = 8, 64
HIGH_BITS = 7  # of a weight's 14
SCORE_STEP_BYTES = 4 if HAS_VPDPBUSD else 8  # of a row of A


def make_integer_code(vectors: int, adds: bool, wide: int):
    """Return the emitter of a tile of an int8 cache. B: values if it `adds`, else keys, then their scales."""
    multiply = INTEGER_STEPS[TARGET.int8_cache].multiply
    planes = 2 if HAS_VPDPBUSD and adds else 1
    step_bytes, parts = (4, planes) if HAS_VPDPBUSD else (8, 2)
    part_bytes = PLANE_BYTES if HAS_VPDPBUSD else 4
    finish = _finish_values if adds else _finish_scores

    def code(builder, rows: int, a, lda, b, ldb, steps, c, ldc, ahead, spacing):
        strip = strip_of(rows * planes, vectors)
        a_rows = rows_at(builder, a, lda, rows)
        scales = [load_to_lanes(builder, row, F32) for row in a_rows]
        firsts = [load_to_lanes(builder, at(builder, row, 4), I32) for row in a_rows]

        def take_strip(number, _):
            b_strip, c_strip = (at(builder, start, number, strip * VECTOR_BYTES) for start in (b, c))

            def step(k, sums):
                first = at(builder, times(builder, k, wide), number, strip)
                ask_ahead(builder, ahead, spacing, first, strip)
                b_row = builder.add(b_strip, builder.mul(k, ldb))
                a_step = times(builder, k, step_bytes)
                b_k = [load(builder, at(builder, b_row, v, VECTOR_BYTES), INTS, 32) for v in range(strip)]
                taken = [[vector] * parts if HAS_VPDPBUSD else shorts_of(builder, vector) for vector in b_k]
                sums = [*sums]
                for part in range(parts):
                    for r in range(rows):
                        a_at = at(builder, builder.add(a_rows[r], a_step), HEADER_BYTES + part * part_bytes)
                        a_k = load_to_lanes(builder, a_at, I32)
                        for v in range(strip):
                            i = (r * strip + v) * planes + part % planes
                            sums[i] = multiply(builder, a_k, taken[v][part], sums[i])
                return sums

            zeros = [INTS(None)] * (planes - 1)
            start = [value for first in firsts for value in [*zeros, first] * strip]
            sums = repeat(builder, steps, step, start)
            behind = builder.add(b_strip, builder.mul(ldb, steps))
            for i in range(rows * strip):
                r, v = divmod(i, strip)
                total = builder.sitofp(_joined(builder, sums[i * planes : (i + 1) * planes]), FLOATS)
                c_row = builder.add(c_strip, builder.mul(ldc, a.type(r)))
                c_at = at(builder, c_row, v, VECTOR_BYTES)
                scales_at = at(builder, behind, v, VECTOR_BYTES)
                store(builder, finish(builder, total, scales[r], c_at, scales_at), c_at)

        repeat(builder, vectors // strip, take_strip)

    return code


def _joined(builder, planes):
    if len(planes) == 1:
        return planes[0]
    high, low = planes
    return builder.add(low, builder.shl(high, splat(INTS, HIGH_BITS)))


def _finish_values(builder, total, scale, c, behind):
    return multiply_add(builder, total, scale, load(builder, c, FLOATS))


def _finish_scores(builder, total, scale, c, behind):
    return builder.fmul(builder.fmul(total, scale), load(builder, behind, FLOATS))
