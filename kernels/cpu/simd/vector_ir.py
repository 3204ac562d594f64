"""Pieces of LLVM vector IR for tiles and reductions, and intrinsics without loops."""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

F32, I64, I32, I16, I8 = (ir.FloatType(), *map(ir.IntType, (64, 32, 16, 8)))  # an address is I64
LANES = 16
FLOATS = ir.VectorType(F32, LANES)
INTS = ir.VectorType(I32, LANES)
VECTOR_BYTES = 4 * LANES
ROUNDING = np.float32(12582912.0)  # 1.5 * 2**23: a sum has the nearest whole number in its low bits
ROUNDING_BITS = np.int32(ROUNDING.view(np.int32))  # above that number


def declare(builder, name: str, result, arguments):
    functions = builder.module.globals
    return functions.get(name) or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def load(builder, address, kind, align: int):
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def store(builder, value, address, align: int) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = align


def at(builder, start, number, size: int = 1):
    """Return the address `number` times `size` after `start`; number: an int or a value."""
    if isinstance(number, int):
        return builder.add(start, ir.Constant(start.type, number * size))
    return builder.add(start, number if size == 1 else builder.mul(number, ir.Constant(start.type, size)))


def rows_at(builder, first, stride, rows: int):
    return [builder.add(first, builder.mul(stride, ir.Constant(first.type, r))) for r in range(rows)]


def times(builder, number, size: int):
    return builder.mul(number, ir.Constant(number.type, size))


def prefetch(builder, address, to_write: bool = False, level: int = 1) -> None:
    """Prefetch the line at an address, which may be invalid, into the L1 or L2 cache."""
    line = I8.as_pointer()
    ask = declare(builder, "llvm.prefetch.p0", ir.VoidType(), [line, I32, I32, I32])
    locality = ir.Constant(I32, 4 - level)
    data = ir.Constant(I32, 1)
    builder.call(ask, [builder.inttoptr(address, line), ir.Constant(I32, int(to_write)), locality, data])


def broadcast(builder, value, lanes: int = LANES):
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    lane = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(lane, undefined, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def multiply_add(builder, x, y, z):
    return builder.call(declare(builder, f"llvm.fma.v{LANES}f32", FLOATS, [FLOATS] * 3), [x, y, z])


def repeat(builder, count, body, initial):
    """Repeat `body(index, values) -> values` count >= 1 times, an int or a value. Return the last values."""
    count = ir.Constant(I64, count) if isinstance(count, int) else count
    entry = builder.block
    loop = builder.append_basic_block("loop")
    done = builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(count.type)
    values = [builder.phi(value.type) for value in initial]
    new = body(index, values)
    following = builder.add(index, ir.Constant(count.type, 1))
    start = [ir.Constant(count.type, 0), *initial]
    for phi, before, after in zip([index, *values], start, [following, *new], strict=True):
        phi.add_incoming(before, entry)
        phi.add_incoming(after, builder.block)  # the body may end in another block
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    return new


def make_reduction(start: float, combine, combine_lanes):
    @intrinsic
    def reduce(typingctx, x, vectors):
        def codegen(context, builder, signature, args):
            x, vectors = args

            def step(i, accumulators):
                return [
                    combine(
                        builder, accumulators[0], load(builder, at(builder, x, i, VECTOR_BYTES), FLOATS, 4)
                    )
                ]

            (total,) = repeat(builder, vectors, step, [ir.Constant(FLOATS, [start] * LANES)])
            return fold(builder, total, combine_lanes)

        return types.float32(types.intp, types.intp), codegen

    return reduce


def fold(builder, vector, combine):
    """Fold 16 lanes into one value, the upper half onto the lower."""
    width = LANES
    while width > 1:
        width //= 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        lanes = ir.VectorType(I32, width)
        masks = [ir.Constant(lanes, list(range(first, first + width))) for first in (0, width)]
        halves = [builder.shuffle_vector(vector, undefined, mask) for mask in masks]
        vector = combine(builder, *halves)
    return builder.extract_element(vector, ir.Constant(I32, 0))


def add(builder, x, y):
    return builder.fadd(x, y)


def add_int(builder, x, y):
    return builder.add(x, y)


def maximum(builder, x, y):
    return builder.select(builder.fcmp_ordered(">", y, x), y, x)


def maximum_int(builder, x, y):
    return builder.select(builder.icmp_signed(">", y, x), y, x)


def _add_square(builder, total, x):
    return multiply_add(builder, x, x, total)


# One chain a lane, folded in halves: a fixed order.
sum_lanes = make_reduction(0.0, add, add)
sum_squares_lanes = make_reduction(0.0, _add_square, add)
max_lanes = make_reduction(float("-inf"), maximum, maximum)


@intrinsic
def address(typingctx, array):
    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, context.get_value_type(types.intp))

    return types.intp(array), codegen


def _make_view(dtype):
    """Return the intrinsic view(address, n): a 1-d array over n values.

    A slice would count references, in an atomic counter that threads share.
    """
    array = types.Array(dtype, 1, "C")

    @intrinsic
    def view(typingctx, address, n):
        def codegen(context, builder, signature, args):
            from numba.np.arrayobj import populate_array  # a kernel from disk does without this slow import

            result = context.make_array(array)(context, builder)
            itemsize = context.get_constant(types.intp, dtype.bitwidth // 8)
            data = builder.inttoptr(args[0], context.get_data_type(dtype).as_pointer())
            populate_array(
                result,
                data=data,
                shape=[args[1]],
                strides=[itemsize],
                itemsize=itemsize,
                meminfo=None,
                parent=None,
            )
            return result._getvalue()

        return array(types.intp, types.intp), codegen

    return view


float32_at, uint8_at, int16_at, uint16_at, int32_at, uint32_at = (
    _make_view(dtype)
    for dtype in (types.float32, types.uint8, types.int16, types.uint16, types.int32, types.uint32)
)


@intrinsic
def fma(typingctx, x, y, z):
    def codegen(context, builder, signature, args):
        return builder.call(declare(builder, "llvm.fma.f32", F32, [F32] * 3), args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def expect_write(typingctx, address):
    """Prefetch the line at an address for writing."""

    def codegen(context, builder, signature, args):
        prefetch(builder, args[0], to_write=True)
        return context.get_dummy_value()

    return types.void(types.intp), codegen
