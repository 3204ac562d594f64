"""Tiles of float32 and bfloat16 for ARM: the chains of tiles.py, in registers of 16 bytes.

A register of A is multiplied lane by lane. A `quad` is a register of 4 columns of B:

    B            B is taken as         a register of A is        a step adds, in each of 4 columns
    float32      it lies               4 float32: 4 steps        a product, fused
    bfloat16     it lies               2 bfloat16: a step        two products, fused in turn                  LONGS
                 float32               4 float32: 2 steps        the same                                     WIDENED
    int8, int4   int8                  16 int8: 4 steps          four products, in int32                      DOTS
                 uint8, 2 columns      2 rows of 8 int8          eight products, in each of 2 rows            MATRICES
"""

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir
from numba import types

from tinygpt.kernels.cpu.simd.panels import PANEL_VECTORS, ask_ahead
from tinygpt.kernels.cpu.simd.steps import BFloat
from tinygpt.kernels.cpu.simd.targets import LONGS, TARGET
from tinygpt.kernels.cpu.simd.vector_ir import F32, I8, I32, VECTOR_BYTES, declare, load, repeat, store

REGISTER_BYTES = 16
QUAD = 4  # columns
FLOAT_QUAD, INT_QUAD, BYTES, BFLOATS = (
    ir.VectorType(kind, REGISTER_BYTES // size) for kind, size in ((F32, 4), (I32, 4), (I8, 1), (BFloat(), 2))
)
LONG = ir.IntType(64)


class LaneStep(NamedTuple):
    bytes: int  # of a row of A
    register: ir.VectorType  # of A
    # Steps that a register of A serves. LLVM would broadcast a single float32 as it loads it; a lane of bfloat16 must
    # be in one of the first 16 registers.
    together: int
    # (builder, a register of each row, the step in it, a quad, a sum of each row) -> sums
    multiply: Callable


def lane(builder, register, i: int):
    count = register.type.count
    mask = ir.Constant(ir.VectorType(I32, count), [i] * count)
    return builder.shuffle_vector(register, ir.Constant(register.type, ir.Undefined), mask)


def four(builder, register, i: int):
    """Return the i-th 4 bytes of 16, in all lanes."""
    return builder.bitcast(lane(builder, builder.bitcast(register, INT_QUAD), i), BYTES)


def fma(builder, x, y, z):
    return builder.call(declare(builder, "llvm.fma.v4f32", FLOAT_QUAD, [FLOAT_QUAD] * 3), [x, y, z])


def _multiply_floats(builder, rows, j, quad, sums):
    quad = builder.bitcast(quad, FLOAT_QUAD)
    return [fma(builder, quad, lane(builder, row, j), total) for row, total in zip(rows, sums, strict=True)]


def _multiply_widened(builder, rows, j, quad, sums):
    high = builder.and_(quad, ir.Constant(INT_QUAD, [0xFFFF0000] * QUAD))
    low = builder.shl(quad, ir.Constant(INT_QUAD, [16] * QUAD))
    sums = _multiply_floats(builder, rows, 2 * j + 1, high, sums)
    return _multiply_floats(builder, rows, 2 * j, low, sums)


def _multiply_longs(builder, rows, j, quad, sums):
    quad = builder.bitcast(quad, BFLOATS)
    for i, name in ((2 * j + 1, "bfmlalt"), (2 * j, "bfmlalb")):  # high half first: the chain's order
        function = declare(builder, f"llvm.aarch64.neon.{name}", FLOAT_QUAD, [FLOAT_QUAD, BFLOATS, BFLOATS])
        sums = [
            builder.call(function, [total, quad, lane(builder, row, i)]) for row, total in zip(rows, sums, strict=True)
        ]
    return sums


FLOAT_STEP = LaneStep(4, FLOAT_QUAD, 4, _multiply_floats)
LONG_STEP, WIDENED_STEP = LaneStep(4, BFLOATS, 1, _multiply_longs), LaneStep(8, FLOAT_QUAD, 2, _multiply_widened)
PAIR_STEP = LONG_STEP if TARGET.bfloat16 == LONGS else WIDENED_STEP
LANE_STEPS = {types.float32: FLOAT_STEP, types.uint16: PAIR_STEP}  # by the dtype of the array that holds B


def add_dot(builder, total, quad, a, is_signed: bool):
    """Add to 4 sums four products each: a quad's bytes by 4 signed ones of A."""
    function = declare(
        builder, f"llvm.aarch64.neon.{'sdot' if is_signed else 'usdot'}.v4i32.v16i8", INT_QUAD, [INT_QUAD, BYTES, BYTES]
    )
    return builder.call(function, [total, builder.bitcast(quad, BYTES), a])


def add_matrix(builder, total, columns, rows):
    """Add eight products each to 4 sums: column 0 by rows 0 and 1, then column 1."""
    function = declare(builder, "llvm.aarch64.neon.usmmla.v4i32.v16i8", INT_QUAD, [INT_QUAD, BYTES, BYTES])
    return builder.call(function, [total, builder.bitcast(columns, BYTES), builder.bitcast(rows, BYTES)])


def load_register(builder, address, kind, size: int = REGISTER_BYTES):
    """Load 16 bytes, or the first 4 or 8 of a register."""
    if size == REGISTER_BYTES:
        return load(builder, address, kind, 4)
    number = ir.IntType(8 * size)
    start = ir.Constant(ir.VectorType(number, REGISTER_BYTES // size), ir.Undefined)
    value = load(builder, address, number, 4)
    return builder.bitcast(builder.insert_element(start, value, ir.Constant(I32, 0)), kind)


def repeat_any(builder, count, body, initial):
    before, some = builder.block, builder.append_basic_block("some")
    done = builder.append_basic_block("none_left")
    builder.cbranch(builder.icmp_signed(">", count, ir.Constant(count.type, 0)), some, done)
    builder.position_at_end(some)
    new, after = repeat(builder, count, body, initial), builder.block
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
