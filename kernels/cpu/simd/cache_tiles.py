"""Tiles over an int8 KV cache: integer sums, the same bits with any instruction.

A row of A begins with its scale (float32) and the start of its sums (int32), -128 times the sum of its numbers, as a
byte of B is a number + 128. Numbers are int16, or int8 for `vpdpbusd`, with 14-bit weights in two planes.
"""

from llvmlite import ir

from tinygpt.kernels.cpu.simd.panels import ask_ahead
from tinygpt.kernels.cpu.simd.steps import INTEGER_STEPS, shorts_of, strip_of
from tinygpt.kernels.cpu.simd.targets import FOURS, TARGET
from tinygpt.kernels.cpu.simd.vector_ir import (
    F32,
    FLOATS,
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

IN_FOURS = TARGET.int8_cache == FOURS
HEADER_BYTES, PLANE_BYTES = 8, 64
HIGH_BITS = 7  # of a weight's 14
SCORE_STEP_BYTES = 4 if IN_FOURS else 8  # of a row of A


def make_integer_code(vectors: int, adds: bool, wide: int):
    """Return the emitter of a tile. If it `adds`, B are values, else keys, with scales after the last step."""
    multiply = INTEGER_STEPS[TARGET.int8_cache].multiply
    planes = 2 if IN_FOURS and adds else 1
    step_bytes, parts = (4, planes) if IN_FOURS else (8, 2)
    part_bytes = PLANE_BYTES if IN_FOURS else 4
    finish = _finish_values if adds else _finish_scores

    def code(builder, rows: int, a, lda, b, ldb, steps, c, ldc, ahead, spacing):
        strip = strip_of(rows * planes, vectors)

        def size(n: int):
            return ir.Constant(a.type, n)

        def at(start, offset: int):
            return builder.add(start, size(offset))

        a_rows = [builder.add(a, builder.mul(lda, size(r))) for r in range(rows)]
        scales = [broadcast(builder, load(builder, row, F32, 4)) for row in a_rows]
        firsts = [broadcast(builder, load(builder, at(row, 4), I32, 4)) for row in a_rows]

        def take_strip(number, _):
            columns = builder.mul(number, size(strip * VECTOR_BYTES))
            b_strip, c_strip = builder.add(b, columns), builder.add(c, columns)

            def step(k, sums):
                first = builder.add(builder.mul(k, size(wide)), builder.mul(number, size(strip)))
                ask_ahead(builder, ahead, spacing, first, strip)
                b_row, a_step = builder.add(b_strip, builder.mul(k, ldb)), builder.mul(k, size(step_bytes))
                b_k = [load(builder, at(b_row, v * VECTOR_BYTES), INTS, 32) for v in range(strip)]
                taken, sums = [[vector] * parts if IN_FOURS else shorts_of(builder, vector) for vector in b_k], [*sums]
                for part in range(parts):
                    for r in range(rows):
                        a_at = at(builder.add(a_rows[r], a_step), HEADER_BYTES + part * part_bytes)
                        a_k = broadcast(builder, load(builder, a_at, I32, 4))
                        for v in range(strip):
                            i = (r * strip + v) * planes + part % planes
                            sums[i] = multiply(builder, a_k, taken[v][part], sums[i])
                return sums

            zeros = [ir.Constant(INTS, None)] * (planes - 1)
            start = [value for first in firsts for value in [*zeros, first] * strip]
            sums = repeat(builder, steps, step, start)
            behind = builder.add(b_strip, builder.mul(ldb, steps))
            for i in range(rows * strip):
                r, v = divmod(i, strip)
                total = builder.sitofp(_joined(builder, sums[i * planes : (i + 1) * planes]), FLOATS)
                c_at = at(builder.add(c_strip, builder.mul(ldc, size(r))), v * VECTOR_BYTES)
                store(builder, finish(builder, total, scales[r], c_at, at(behind, v * VECTOR_BYTES)), c_at, 4)
            return []

        repeat(builder, size(vectors // strip), take_strip, [])

    return code


def _joined(builder, planes):
    if len(planes) == 1:
        return planes[0]
    high, low = planes
    return builder.add(low, builder.shl(high, ir.Constant(INTS, [HIGH_BITS] * LANES)))


def _finish_values(builder, total, scale, c, behind):
    return multiply_add(builder, total, scale, load(builder, c, FLOATS, 4))


def _finish_scores(builder, total, scale, c, behind):
    return builder.fmul(builder.fmul(total, scale), load(builder, behind, FLOATS, 4))
