"""Micro-kernels written as LLVM vector IR inside Numba intrinsics. Everything here works on raw addresses.

`tile_RxN` multiplies R rows of A by N*16 columns of B over `steps` values of k and stores the R x N*16 block
of C. Each output element is one chain of fused multiply-adds in the order of k, whatever R, N and the CPU are:
hence a row's bits do not depend on its batch. B is read as rows of k, `ldb` bytes apart; within a step the
R*N accumulators stay in registers, N vectors of B are loaded, and one value of each of the R rows of A is
broadcast to all 16 lanes.

`sum_lanes`, `sum_squares_lanes` and `max_lanes` reduce vectors of 16 values, one chain a lane, the lanes folded
in halves: a fixed order again, which LLVM's own reordering of a loop would not promise.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tinygpt.kernels.cpu.jit import has_feature, jit

F32, I32 = ir.FloatType(), ir.IntType(32)
LANES = 16
VECTOR = ir.VectorType(F32, LANES)
VECTOR_BYTES = 4 * LANES


def _declare(builder, name: str, result, arguments):
    functions = builder.module.globals
    return functions.get(name) or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def _load(builder, address, kind, align: int):
    load = builder.load(builder.inttoptr(address, kind.as_pointer()))
    load.align = align
    return load


def _broadcast(builder, value):
    undefined = ir.Constant(VECTOR, ir.Undefined)
    lane = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(lane, undefined, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))


def _loop(builder, count, body, initial):
    """Repeat `body(index, values) -> values` `count` >= 1 times; return the last values."""
    index_type = count.type
    entry = builder.block
    loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(index_type)
    index.add_incoming(ir.Constant(index_type, 0), entry)
    values = [builder.phi(value.type) for value in initial]
    for phi, value in zip(values, initial, strict=True):
        phi.add_incoming(value, entry)
    new = body(index, values)
    after = builder.add(index, ir.Constant(index_type, 1))
    for phi, value in zip([index, *values], [after, *new], strict=True):
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", after, count), loop, done)
    builder.position_at_end(done)
    return new


def make_tile(rows: int, vectors: int):
    """The intrinsic tile(a, lda, b, ldb, steps, c, ldc): float32 addresses, strides in bytes, steps >= 1."""

    @intrinsic
    def tile(typingctx, a, lda, b, ldb, steps, c, ldc):
        def codegen(context, builder, signature, args):
            a, lda, b, ldb, steps, c, ldc = args

            def size(n: int):
                return ir.Constant(a.type, n)

            fma = _declare(builder, f"llvm.fma.v{LANES}f32", VECTOR, [VECTOR] * 3)
            row_starts = [builder.add(a, builder.mul(lda, size(r))) for r in range(rows)]

            def step(k, accumulators):
                b_row = builder.add(b, builder.mul(k, ldb))
                b_k = [_load(builder, builder.add(b_row, size(v * VECTOR_BYTES)), VECTOR, 64) for v in range(vectors)]
                sums = []
                for r in range(rows):
                    a_k = _load(builder, builder.add(row_starts[r], builder.mul(k, size(4))), F32, 4)
                    a_k = _broadcast(builder, a_k)
                    for v in range(vectors):
                        sums.append(builder.call(fma, [a_k, b_k[v], accumulators[r * vectors + v]]))
                return sums

            sums = _loop(builder, steps, step, [ir.Constant(VECTOR, None)] * (rows * vectors))
            for r in range(rows):
                c_row = builder.add(c, builder.mul(ldc, size(r)))
                for v in range(vectors):
                    address = builder.add(c_row, size(v * VECTOR_BYTES))
                    store = builder.store(sums[r * vectors + v], builder.inttoptr(address, VECTOR.as_pointer()))
                    store.align = 4
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), codegen

    return tile


def _make_reduction(start: float, combine, fold):
    """The intrinsic reduce(x, vectors): float32 result over vectors * 16 values at address x, vectors >= 1."""

    @intrinsic
    def reduce(typingctx, x, vectors):
        def codegen(context, builder, signature, args):
            x, vectors = args

            def step(i, accumulators):
                address = builder.add(x, builder.mul(i, ir.Constant(i.type, VECTOR_BYTES)))
                return [combine(builder, accumulators[0], _load(builder, address, VECTOR, 4))]

            (total,) = _loop(builder, vectors, step, [ir.Constant(VECTOR, [start] * LANES)])
            return _fold(builder, total, fold)

        return types.float32(types.intp, types.intp), codegen

    return reduce


def _fold(builder, vector, combine):
    """16 lanes to one value: the upper half onto the lower, four times."""
    width = LANES
    while width > 1:
        width //= 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        lanes = ir.VectorType(I32, width)
        masks = [ir.Constant(lanes, list(range(first, first + width))) for first in (0, width)]
        halves = [builder.shuffle_vector(vector, undefined, mask) for mask in masks]
        vector = combine(builder, *halves)
    return builder.extract_element(vector, ir.Constant(I32, 0))


def _add(builder, x, y):
    return builder.fadd(x, y)


def _max(builder, x, y):
    return builder.select(builder.fcmp_ordered(">", y, x), y, x)


def _add_square(builder, total, x):
    fma = _declare(builder, f"llvm.fma.v{LANES}f32", VECTOR, [VECTOR] * 3)
    return builder.call(fma, [x, x, total])


@intrinsic
def address(typingctx, array):
    """Where the array's first value lies."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, context.get_value_type(types.intp))

    return types.intp(array), codegen


@intrinsic
def fma(typingctx, x, y, z):
    """x * y + z with one rounding; LLVM vectorises it inside a loop."""

    def codegen(context, builder, signature, args):
        return builder.call(_declare(builder, "llvm.fma.f32", F32, [F32] * 3), args)

    return types.float32(types.float32, types.float32, types.float32), codegen


# A cached kernel must reach its intrinsics as module-level names.
sum_lanes = _make_reduction(0.0, _add, _add)
sum_squares_lanes = _make_reduction(0.0, _add_square, _add)
max_lanes = _make_reduction(float("-inf"), _max, _max)

# 6 x 64: 24 accumulators, 4 vectors of B and one of A fill 29 of AVX-512's 32 registers. Elsewhere a vector of
# 16 takes two or four registers, and 6 x 16 is what fits.
PANEL_VECTORS = 4 if has_feature("avx512f") else 1
PANEL = PANEL_VECTORS * LANES
TILE_ROWS = 6
tile_6, tile_5, tile_4, tile_3, tile_2, tile_1 = (make_tile(rows, PANEL_VECTORS) for rows in (6, 5, 4, 3, 2, 1))
strip_6, strip_5, strip_4, strip_3, strip_2, strip_1 = (make_tile(rows, 1) for rows in (6, 5, 4, 3, 2, 1))


@jit
def panel_tile(rows, a, lda, b, ldb, steps, c, ldc):
    """C (rows, PANEL) = A (rows, steps) @ B (steps, PANEL), 1 <= rows <= TILE_ROWS; strides in bytes."""
    if rows == 6:
        tile_6(a, lda, b, ldb, steps, c, ldc)
    elif rows == 5:
        tile_5(a, lda, b, ldb, steps, c, ldc)
    elif rows == 4:
        tile_4(a, lda, b, ldb, steps, c, ldc)
    elif rows == 3:
        tile_3(a, lda, b, ldb, steps, c, ldc)
    elif rows == 2:
        tile_2(a, lda, b, ldb, steps, c, ldc)
    else:
        tile_1(a, lda, b, ldb, steps, c, ldc)


@jit
def strip_tile(rows, a, lda, b, ldb, steps, c, ldc):
    """The same for B of LANES columns."""
    if rows == 6:
        strip_6(a, lda, b, ldb, steps, c, ldc)
    elif rows == 5:
        strip_5(a, lda, b, ldb, steps, c, ldc)
    elif rows == 4:
        strip_4(a, lda, b, ldb, steps, c, ldc)
    elif rows == 3:
        strip_3(a, lda, b, ldb, steps, c, ldc)
    elif rows == 2:
        strip_2(a, lda, b, ldb, steps, c, ldc)
    else:
        strip_1(a, lda, b, ldb, steps, c, ldc)


@jit
def wide_tile(rows, a, lda, b, ldb, steps, c, ldc, columns):
    """The same for B of any multiple of LANES columns: panels first, then strips."""
    done = 0
    while columns - done >= PANEL:
        panel_tile(rows, a, lda, b + done * 4, ldb, steps, c + done * 4, ldc)
        done += PANEL
    while done < columns:
        strip_tile(rows, a, lda, b + done * 4, ldb, steps, c + done * 4, ldc)
        done += LANES
