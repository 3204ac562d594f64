"""Tiles of float32 and bfloat16 for ARM: as in tiles.py, the same chains, in registers of four columns.

The 24 accumulators of 6 rows and 16 columns, a register of each row of A and two for B fill the 32 that there are.
"""

from llvmlite import ir

from tinygpt.kernels.cpu.simd.lane_steps import (
    FLOAT_QUAD,
    INT_QUAD,
    REGISTER_BYTES,
    LaneStep,
    load_register,
    repeat_any,
)
from tinygpt.kernels.cpu.simd.panels import PANEL_VECTORS, ask_ahead
from tinygpt.kernels.cpu.simd.targets import TARGET
from tinygpt.kernels.cpu.simd.vector_ir import VECTOR_BYTES, load, repeat, store

QUADS = VECTOR_BYTES // REGISTER_BYTES  # of a vector of 16 lanes


def strip_of_lanes(rows: int, vectors: int = PANEL_VECTORS) -> int:
    """Vectors of columns that a tile of this height takes at a time: as many as leave room for A, and two for B."""
    strips = (strip for strip in (4, 3, 2, 1) if vectors % strip == 0)
    return next(strip for strip in strips if rows * (strip * QUADS + 1) + 2 <= TARGET.registers)


def make_lane_code(vectors: int, adds: bool, wide: int, step: LaneStep):
    """What emits a tile of so many rows, as make_code in tiles.py wants it; `step`: how a dtype multiplies."""

    def code(builder, rows: int, a, lda, b, ldb, steps, c, ldc, ahead, spacing):
        strip, together = strip_of_lanes(rows, vectors), step.together
        quads = range(strip * QUADS)

        def size(n: int):
            return ir.Constant(a.type, n)

        def starts(first, stride):
            return [builder.add(first, builder.mul(stride, size(r))) for r in range(rows)]

        a_starts, c_starts = starts(a, lda), starts(c, ldc)

        def take_strip(number, _):
            columns = builder.mul(number, size(strip * VECTOR_BYTES))
            b_strip = builder.add(b, columns)

            def take(k, count: int, sums):
                """`count` steps from the k-th on."""
                a_k = builder.mul(k, size(step.bytes))
                places = [builder.add(start, a_k) for start in a_starts]
                a_rows = [load_register(builder, at, step.register, count * step.bytes) for at in places]
                for j in range(count):
                    k_j = builder.add(k, size(j))
                    asked = builder.add(builder.mul(k_j, size(wide)), builder.mul(number, size(strip)))
                    ask_ahead(builder, ahead, spacing, asked, strip)
                    b_row, new = builder.add(b_strip, builder.mul(k_j, ldb)), []
                    for q in quads:
                        quad = load(builder, builder.add(b_row, size(q * REGISTER_BYTES)), INT_QUAD, REGISTER_BYTES)
                        new += step.multiply(builder, a_rows, j, quad, sums[q * rows : (q + 1) * rows])
                    sums = new
                return sums

            places = [
                builder.add(builder.add(start, columns), size(q * REGISTER_BYTES)) for q in quads for start in c_starts
            ]
            sums = [load(builder, at, FLOAT_QUAD, 4) if adds else ir.Constant(FLOAT_QUAD, None) for at in places]
            done = size(0)
            if together > 1:
                whole = builder.udiv(steps, size(together))
                done = builder.mul(whole, size(together))
                sums = repeat_any(
                    builder, whole, lambda i, sums: take(builder.mul(i, size(together)), together, sums), sums
                )
            rest = builder.sub(steps, done)
            sums = repeat_any(builder, rest, lambda i, sums: take(builder.add(done, i), 1, sums), sums)
            for at, total in zip(places, sums, strict=True):
                store(builder, total, at, 4)
            return []

        repeat(builder, size(vectors // strip), take_strip, [])

    return code
