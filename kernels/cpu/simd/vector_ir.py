"""Vectors of 16 lanes and panels of four: LLVM IR, aligned memory, a tile's last rows."""

import inspect
import math

import numpy as np
from llvmlite import ir

from ...numbers import ROUNDING
from ..jit import Intrinsic

F32, I64, I32, I16, I8 = (ir.FloatType(), *map(ir.IntType, (64, 32, 16, 8)))  # an address is I64
LANES = 16
FLOATS = ir.VectorType(F32, LANES)
INTS = ir.VectorType(I32, LANES)
VECTOR_BYTES = 4 * LANES
PANEL_VECTORS = 4
ROW_BYTES = PANEL_VECTORS * VECTOR_BYTES  # of a panel: a step of all its columns
SCALE_GROUP = 64  # values of K that share an activation's scale
WEIGHT_GROUP = 32  # values of K that share an int4 weight's scale and offset
SCALES_BYTES = 4 * 4  # of a row's group in Int8Operand.scales
# Of a panel's WEIGHT_GROUP: bfloat16 scales, then offsets.
WEIGHT_SCALES_BYTES = 2 * PANEL_VECTORS * LANES * 2
ROUNDING_BITS = np.int32(ROUNDING.view(np.int32))  # above the whole number of a sum with ROUNDING


def emits(result: str, *arguments: str):
    """Return a decorator that makes an intrinsic of emit(builder, *arguments) -> value or None.

    Types by Numba's names: importing Numba takes a quarter of a start, and a kernel from disk needs none of it.
    """

    def make(emit):
        def codegen(context, builder, _, values):
            value = emit(builder, *values)
            return context.get_dummy_value() if value is None else value

        def typed(typingctx, *argument_types):
            from numba import types

            kinds = [getattr(types, name) for name in arguments]
            return getattr(types, result)(*kinds), codegen

        return _named_as(emit, typed)

    return make


def emits_by_dtype(numbers: int):
    """Return a decorator that makes an intrinsic(array, *numbers) of emit(builder, the array's dtype, *numbers)."""

    def make(emit):
        def typed(typingctx, like, *argument_types):
            from numba import types

            def codegen(context, builder, _, values):
                emit(builder, str(like.dtype), *values[1:])
                return context.get_dummy_value()

            return types.void(like, *[types.intp] * numbers), codegen

        return _named_as(emit, typed)

    return make


def _named_as(emit, typed) -> Intrinsic:
    typed.__name__ = emit.__name__
    typed.__doc__ = emit.__doc__
    typed.__signature__ = inspect.signature(emit)
    return Intrinsic(typed)


def declare(builder, name: str, result, arguments):
    functions = builder.module.globals
    return functions.get(name) or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def load(builder, address, kind, align: int = 4):
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def store(builder, value, address, align: int = 4) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = align


def at(builder, start, number, size: int = 1):
    """Return the address `number` times `size` after `start`; number: an int or a value."""
    if isinstance(number, int):
        return builder.add(start, start.type(number * size))
    return builder.add(start, number if size == 1 else builder.mul(number, start.type(size)))


def rows_at(builder, first, stride, rows: int):
    return [builder.add(first, builder.mul(stride, first.type(r))) for r in range(rows)]


def times(builder, number, size: int):
    return builder.mul(number, number.type(size))


def prefetch(builder, address, to_write: bool = False, level: int = 1) -> None:
    """Prefetch the line at an address, which may be invalid, into the L1 or L2 cache."""
    line = I8.as_pointer()
    ask = declare(builder, "llvm.prefetch.p0", ir.VoidType(), [line, I32, I32, I32])
    locality = I32(4 - level)
    data = I32(1)
    builder.call(ask, [builder.inttoptr(address, line), I32(int(to_write)), locality, data])


def broadcast(builder, value, lanes: int = LANES):
    undefined = ir.VectorType(value.type, lanes)(ir.Undefined)
    return shuffle(builder, [0] * lanes, builder.insert_element(undefined, value, I32(0)))


def shuffle(builder, places, first, second=None):
    """Return lanes of a vector, or of two end to end, by their places."""
    second = first.type(ir.Undefined) if second is None else second
    return builder.shuffle_vector(first, second, ir.VectorType(I32, len(places))(list(places)))


def load_to_lanes(builder, address, kind):
    return broadcast(builder, load(builder, address, kind))


def splat(kind, value):
    """Return a constant vector with the value in every lane."""
    return kind([value] * kind.count)


def multiply_add(builder, x, y, z):
    return builder.call(declare(builder, f"llvm.fma.v{LANES}f32", FLOATS, [FLOATS] * 3), [x, y, z])


def repeat(builder, count, body, initial=()):
    """Repeat body(index, values) -> values or None `count` >= 1 times. Return the last values."""
    count = I64(count) if isinstance(count, int) else count
    entry = builder.block
    loop = builder.append_basic_block("loop")
    done = builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(count.type)
    values = [builder.phi(value.type) for value in initial]
    new = body(index, values) or []
    following = builder.add(index, count.type(1))
    start = [count.type(0), *initial]
    for phi, before, after in zip([index, *values], start, [following, *new], strict=True):
        phi.add_incoming(before, entry)
        phi.add_incoming(after, builder.block)  # the body may end in another block
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    return new


def make_reduction(start: float, combine, combine_lanes):
    @emits("float32", "intp", "intp")
    def reduce(builder, x, vectors):
        def step(i, accumulators):
            vector = load(builder, at(builder, x, i, VECTOR_BYTES), FLOATS)
            return [combine(builder, *accumulators, vector)]

        (total,) = repeat(builder, vectors, step, [splat(FLOATS, start)])
        return fold(builder, total, combine_lanes)

    return reduce


def fold(builder, vector, combine):
    """Fold 16 lanes into one value, the upper half onto the lower."""
    width = LANES
    while width > 1:
        width //= 2
        halves = [shuffle(builder, range(first, first + width), vector) for first in (0, width)]
        vector = combine(builder, *halves)
    return builder.extract_element(vector, I32(0))


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


@Intrinsic
def address(typingctx, array):
    from numba import types

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, context.get_value_type(types.intp))

    return types.intp(array), codegen


def _make_view(dtype: str):
    """Return the intrinsic view(address, n): a 1-d array over n values.

    A slice would count references, in an atomic counter that threads share.
    """

    @Intrinsic
    def view(typingctx, address, n):
        from numba import types

        array = types.Array(getattr(types, dtype), 1, "C")

        def codegen(context, builder, signature, args):
            data = builder.inttoptr(args[0], context.get_data_type(array.dtype).as_pointer())
            return array_at(context, builder, array, data, args[1])

        return array(types.intp, types.intp), codegen

    return view


def array_at(context, builder, kind, data, size):
    """Return an array of a type, without an owner, over `size` values at a pointer."""
    from numba import types
    from numba.np.arrayobj import populate_array

    result = context.make_array(kind)(context, builder)
    itemsize = context.get_constant(types.intp, kind.dtype.bitwidth // 8)
    populate_array(
        result, data=data, shape=[size], strides=[itemsize], itemsize=itemsize, meminfo=None, parent=None
    )
    return result._getvalue()


float32_at, uint8_at, int16_at, uint16_at, int32_at, uint32_at = (
    _make_view(dtype) for dtype in ("float32", "uint8", "int16", "uint16", "int32", "uint32")
)


@emits("float32", "float32", "float32", "float32")
def fma(builder, x, y, z):
    return builder.call(declare(builder, "llvm.fma.f32", F32, [F32] * 3), [x, y, z])


@emits("void", "intp")
def expect_write(builder, address):
    """Prefetch the line at an address for writing."""
    prefetch(builder, address, to_write=True)


def ask_ahead(builder, ahead, spacing, first, count: int) -> None:
    """Prefetch `count` places from the `first` after `ahead`, `spacing` apart, into the L2 cache; L1 is full."""
    for i in range(count):
        prefetch(builder, builder.add(ahead, builder.mul(at(builder, first, i), spacing)), level=2)


def ask_row_ahead(
    builder, ahead, spacing, k, number, strip: int, vectors: int, lines: int, wide: int
) -> None:
    """Prefetch a strip's part of a row of `vectors` vectors of B, which is `lines` lines of a cache."""
    strips = vectors // strip
    if lines == wide:
        ask_ahead(builder, ahead, spacing, at(builder, times(builder, k, wide), number, strip), strip)
    else:
        ask_part_ahead(builder, ahead, spacing, at(builder, times(builder, k, strips), number), lines, strips)


def ask_part_ahead(builder, ahead, spacing, number, lines: int, strips: int) -> None:
    """Prefetch a strip's part of the lines of a row of B."""
    if lines >= strips:
        ask_ahead(builder, ahead, spacing, times(builder, number, lines // strips), lines // strips)
    else:  # several strips share a line
        part = builder.udiv(spacing, spacing.type(strips // lines))
        ask_ahead(builder, ahead, part, number, 1)


def zeros(shape: tuple[int, ...], dtype=np.float32) -> np.ndarray:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + VECTOR_BYTES, np.uint8)
    start = -raw.ctypes.data % VECTOR_BYTES
    return raw[start : start + size].view(dtype).reshape(shape)


def row_vectors(builder, start):
    return [at(builder, start, v, VECTOR_BYTES) for v in range(PANEL_VECTORS)]


def load_row(builder, start):
    return [load(builder, place, FLOATS) for place in row_vectors(builder, start)]


def store_each(builder, values, places) -> None:
    for value, place in zip(values, places, strict=True):
        store(builder, value, place)


def make_rows(adds: bool):
    """Return the intrinsic rows(target, stride, y, count, scales, biases): target = y * scales + biases, or +=.

    Addresses; count >= 1; y has no gaps and may be the target. Scales of 1 or biases of -0 change nothing.
    """

    @emits("void", *["intp"] * 6)
    def rows(builder, target, stride, y, count, scales, biases):
        scales = load_row(builder, scales)
        biases = load_row(builder, biases)

        def finish(i, _):
            values = load_row(builder, at(builder, y, i, ROW_BYTES))
            places = row_vectors(builder, builder.add(target, builder.mul(i, stride)))
            for value, scale, bias, place in zip(values, scales, biases, places, strict=True):
                result = builder.fadd(builder.fmul(value, scale), bias)
                result = builder.fadd(load(builder, place, FLOATS), result) if adds else result
                store(builder, result, place)

        repeat(builder, count, finish)

    return rows


def make_segments_sum(segments: int):
    """Return the intrinsic total(y, spacing, count, scales): y * scales of segments, (s0 + s1) + (s2 + s3).

    Segments lie `spacing` bytes apart. count >= 1.
    """

    @emits("void", *["intp"] * 4)
    def total(builder, y, spacing, count, scales):
        scales = load_row(builder, scales)

        def add_up(i, _):
            first = at(builder, y, i, ROW_BYTES)
            rows = [load_row(builder, start) for start in rows_at(builder, first, spacing, segments)]
            rows = [[builder.fmul(*pair) for pair in zip(row, scales, strict=True)] for row in rows]
            while len(rows) > 1:
                pairs = [zip(*rows[s : s + 2], strict=True) for s in range(0, len(rows), 2)]
                rows = [[builder.fadd(*pair) for pair in both] for both in pairs]
            store_each(builder, *rows, row_vectors(builder, first))

        repeat(builder, count, add_up)

    return total


# Module-level names, see tiles.py.
put_rows = make_rows(adds=False)
add_rows = make_rows(adds=True)
sum_2_segments = make_segments_sum(2)
sum_4_segments = make_segments_sum(4)


def part_rows(builder, number, part_bytes: int, parts: int, values, scales):
    """Return the addresses of a part of int8 rows, of which a group has `parts`, and its scales."""
    offset = times(builder, number, part_bytes)
    scales_offset = times(builder, builder.udiv(number, I64(parts)), SCALES_BYTES)
    rows = [builder.add(start, offset) for start in values]
    return rows, [builder.add(start, scales_offset) for start in scales]
