"""The innermost steps of ARM's tiles: registers of 16 bytes, and products by one lane of a register.

What a register of A holds is multiplied lane by lane, so that nothing is broadcast, which would take one of the units
that multiply. A `quad` is a register of 4 columns of B:

    B            B is taken as         a register of A is        a step adds, in each of 4 columns
    float32      it lies               4 float32: 4 steps        a product, fused
    bfloat16     it lies               2 bfloat16: a step        two products, fused one after the other      LONGS
                 float32               4 float32: 2 steps        the same                                     WIDENED
    int8, int4   int8                  16 int8: 4 steps          four products, in int32                      DOTS
                 uint8                 the same                  the same                                     a lone row
                 uint8, 2 columns      2 rows of 8 int8          eight products, in each of 2 rows            MATRICES

The instruction of each is in targets.py. `fma` with a lane is one instruction: LLVM finds it.
"""

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir
from numba import types

from tinygpt.kernels.cpu.simd.steps import BFloat
from tinygpt.kernels.cpu.simd.targets import LONGS, TARGET
from tinygpt.kernels.cpu.simd.vector_ir import F32, I8, I32, declare, load, repeat

REGISTER_BYTES = 16
QUAD = 4  # columns
FLOAT_QUAD, INT_QUAD, BYTES, BFLOATS = (
    ir.VectorType(kind, REGISTER_BYTES // size) for kind, size in ((F32, 4), (I32, 4), (I8, 1), (BFloat(), 2))
)
LONG = ir.IntType(64)


class LaneStep(NamedTuple):
    """Of float32 or bfloat16."""

    bytes: int  # of a row of A
    register: ir.VectorType  # of A
    # How many of them a register of A is loaded for. LLVM would broadcast a single float32 as it loads it. A lane of
    # bfloat16 is of one of the first 16 registers: several steps' would take too many of those.
    together: int
    # (builder, a register of each row, which of their steps, a quad, a sum of each row) -> sums
    multiply: Callable


def lane(builder, register, i: int):
    """A lane of a register in all lanes."""
    count = register.type.count
    mask = ir.Constant(ir.VectorType(I32, count), [i] * count)
    return builder.shuffle_vector(register, ir.Constant(register.type, ir.Undefined), mask)


def four(builder, register, i: int):
    """The i-th 4 bytes of 16 in all lanes."""
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
    """4 sums + four products each: of a quad's bytes, and 4 signed ones of A in all lanes."""
    function = declare(
        builder, f"llvm.aarch64.neon.{'sdot' if is_signed else 'usdot'}.v4i32.v16i8", INT_QUAD, [INT_QUAD, BYTES, BYTES]
    )
    return builder.call(function, [total, builder.bitcast(quad, BYTES), a])


def add_matrix(builder, total, columns, rows):
    """4 sums, of column 0 with rows 0 and 1, then of column 1, + eight products each."""
    function = declare(builder, "llvm.aarch64.neon.usmmla.v4i32.v16i8", INT_QUAD, [INT_QUAD, BYTES, BYTES])
    return builder.call(function, [total, builder.bitcast(columns, BYTES), builder.bitcast(rows, BYTES)])


def load_register(builder, address, kind, size: int = REGISTER_BYTES):
    """16 bytes; or the first 4 or 8 of a register, of which the others are not read."""
    if size == REGISTER_BYTES:
        return load(builder, address, kind, 4)
    number = ir.IntType(8 * size)
    start = ir.Constant(ir.VectorType(number, REGISTER_BYTES // size), ir.Undefined)
    value = load(builder, address, number, 4)
    return builder.bitcast(builder.insert_element(start, value, ir.Constant(I32, 0)), kind)


def repeat_any(builder, count, body, initial):
    """As `repeat`, `count` >= 0 times."""
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
