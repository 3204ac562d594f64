"""Micro-kernels written as LLVM vector IR inside Numba intrinsics. Everything here works on raw addresses.

A tile multiplies R rows of A by N*16 columns of B, over K in steps, and stores the R x N*16 block of C as float32.
Each output element is one chain of operations in the order of k, whatever R and N are: hence a row's bits do not
depend on its batch. Per step, N vectors of B are loaded, and 4 bytes of each of the R rows of A are broadcast to all
16 lanes; the R*N accumulators stay in registers.

    kind     4 bytes of A are    a vector of B is            a step
    f32      1 float32           16 float32                  fused multiply-add
    bf16     2 bfloat16          16 pairs of bfloat16        two products a lane, added in float32
    int8     4 int8              16 fours of uint8           four products a lane, added in int32
    int4     4 int8              16 x 8 nibbles: two steps   the same

int8 and int4 add up integers over a group of K, exactly, and fold them to float32 once a group (see `make_grouped`).
"""

import functools

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tinygpt.kernels.cpu.jit import has_feature
from tinygpt.kernels.cpu.simd.vector_ir import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    INTS,
    LANES,
    VECTOR_BYTES,
    broadcast,
    declare,
    load,
    multiply_add,
    prefetch,
    repeat,
    store,
)

PANEL_VECTORS = 4
PANEL = PANEL_VECTORS * LANES
HAS_AVX512 = has_feature("avx512f")
HAS_BF16 = HAS_AVX512 and has_feature("avx512bf16")
HAS_VNNI = HAS_AVX512 and has_feature("avx512vnni")
# 6 x 64: 24 accumulators, 4 vectors of B and one of A fill 29 of AVX-512's 32 registers. Elsewhere a vector of 16
# takes two or four registers, and a panel is walked through in strips of one.
TILE_ROWS = 6
STRIP = PANEL_VECTORS if HAS_AVX512 else 1
# The grouped tiles keep integer and float accumulators: 3 x 64 takes 24 registers for them.
GROUPED_ROWS = 3 if HAS_AVX512 else 1
GROUP = 64  # values of K that share an activation's scale
STEP_BYTES = 4  # of a row of A, and of a column of B, that a step multiplies
STEPS_PER_GROUP = GROUP // STEP_BYTES
SCALES_BYTES = 4 * 4  # of a row's group in Int8Operand.scales: its four entries
# Bytes by which B is fetched ahead. The hardware does so by itself up to the end of a page of 4 KB, and starts anew in
# the next: int4's short rows came from memory at 26 GB/s, and come at 47.
AHEAD = 4096
WEIGHT_GROUP = 32  # values of K that share an int4 weight's scale and offset
WEIGHT_SCALES_BYTES = 2 * PANEL * 2  # of a panel's WEIGHT_GROUP: bfloat16 scales, then offsets


class BFloat(ir.types.Type):
    """LLVM's bfloat, which llvmlite has no class for."""

    def _to_string(self):
        return "bfloat"

    __str__ = _to_string

    def __eq__(self, other):
        return isinstance(other, BFloat)

    def __hash__(self):
        return hash("bfloat")


def _widen_low(builder, pairs):
    """The first bfloat16 of each pair as float32: its bits moved up."""
    return builder.bitcast(builder.shl(pairs, ir.Constant(INTS, [16] * LANES)), FLOATS)


def _widen_high(builder, pairs):
    return builder.bitcast(builder.and_(pairs, ir.Constant(INTS, [0xFFFF0000] * LANES)), FLOATS)


def _step_f32(builder, a, b, accumulator):
    return multiply_add(builder, builder.bitcast(a, FLOATS), builder.bitcast(b, FLOATS), accumulator)


def _step_bf16(builder, a, b, accumulator):
    if HAS_BF16:
        pairs = ir.VectorType(BFloat(), 2 * LANES)
        dot = declare(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [FLOATS, pairs, pairs])
        return builder.call(dot, [accumulator, builder.bitcast(a, pairs), builder.bitcast(b, pairs)])
    accumulator = multiply_add(builder, _widen_high(builder, a), _widen_high(builder, b), accumulator)
    return multiply_add(builder, _widen_low(builder, a), _widen_low(builder, b), accumulator)


def _step_int8(builder, a, b, accumulator):
    """Four products of a signed byte of A and an unsigned one of B, exactly, added to an int32 lane."""
    if HAS_VNNI:
        bytes_ = ir.VectorType(I8, 4 * LANES)
        dot = declare(builder, "llvm.x86.avx512.vpdpbusd.512", INTS, [INTS, bytes_, bytes_])
        return builder.call(dot, [accumulator, builder.bitcast(b, bytes_), builder.bitcast(a, bytes_)])
    # Even and odd bytes as 16-bit pairs: LLVM has a multiply-and-add of pairs on every vector unit.
    for even in (True, False):
        products = builder.mul(_bytes_as_int32(builder, a, even, True), _bytes_as_int32(builder, b, even, False))
        first, second = (_every_second(builder, products, start) for start in (0, 1))
        accumulator = builder.add(accumulator, builder.add(first, second))
    return accumulator


def _bytes_as_int32(builder, vector, even: bool, is_signed: bool):
    """Bytes 0 and 2 (or 1 and 3) of each lane, as 32 int32."""
    shorts = ir.VectorType(I16, 2 * LANES)
    eight = ir.Constant(shorts, [8] * (2 * LANES))
    vector = builder.bitcast(vector, shorts)
    if even:
        vector = builder.shl(vector, eight)
    vector = builder.ashr(vector, eight) if is_signed else builder.lshr(vector, eight)
    wide = ir.VectorType(I32, 2 * LANES)
    return builder.sext(vector, wide) if is_signed else builder.zext(vector, wide)


def _every_second(builder, vector, start: int):
    mask = ir.Constant(INTS, list(range(start, 2 * LANES, 2)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def _load_widened(builder, address):
    halves = load(builder, address, ir.VectorType(I16, LANES), 32)
    return builder.shl(builder.zext(halves, INTS), ir.Constant(INTS, [16] * LANES))


def _load_ahead(builder, address, align: int):
    prefetch(builder, builder.add(address, ir.Constant(address.type, AHEAD)))
    return load(builder, address, INTS, align)


STEPS = {types.float32: _step_f32, types.uint16: _step_bf16}  # by the dtype of the array that holds B


def make_tile(vectors: int, adds: bool = False):
    """The intrinsic tile(like, rows, a, lda, b, ldb, steps, c, ldc): addresses, strides in bytes; C += A @ B if it
    `adds`. A and B are float32, or bfloat16 in pairs, as the values of the array `like` are, of which the type alone
    counts.

    1 <= rows <= TILE_ROWS, steps >= 1. There is code for each number of rows.
    """
    strip = min(STRIP, vectors)

    def strip_code(builder, rows, multiply, a, lda, b, ldb, steps, c, ldc):
        def size(n: int):
            return ir.Constant(a.type, n)

        row_starts = [builder.add(a, builder.mul(lda, size(r))) for r in range(rows)]

        def step(k, accumulators):
            b_row = builder.add(b, builder.mul(k, ldb))
            b_k = [_load_ahead(builder, builder.add(b_row, size(v * VECTOR_BYTES)), 32) for v in range(strip)]
            sums = []
            for r in range(rows):
                a_k = load(builder, builder.add(row_starts[r], builder.mul(k, size(STEP_BYTES))), I32, 4)
                a_k = broadcast(builder, a_k)
                sums += [multiply(builder, a_k, b_k[v], accumulators[r * strip + v]) for v in range(strip)]
            return sums

        c_rows = [builder.add(c, builder.mul(ldc, size(r))) for r in range(rows)]
        places = [builder.add(c_row, size(v * VECTOR_BYTES)) for c_row in c_rows for v in range(strip)]
        start = [load(builder, at, FLOATS, 4) if adds else ir.Constant(FLOATS, None) for at in places]
        for at, total in zip(places, repeat(builder, steps, step, start), strict=True):
            store(builder, total, at, 4)

    def code(builder, rows, multiply, a, lda, b, ldb, steps, c, ldc):
        for first in range(0, vectors, strip):
            b_strip = builder.add(b, ir.Constant(b.type, first * VECTOR_BYTES))
            c_strip = builder.add(c, ir.Constant(c.type, first * VECTOR_BYTES))
            strip_code(builder, rows, multiply, a, lda, b_strip, ldb, steps, c_strip, ldc)

    @intrinsic
    def tile(typingctx, like, rows, a, lda, b, ldb, steps, c, ldc):
        def codegen(context, builder, signature, args):
            _, rows, *places = args
            for_each_height(builder, TILE_ROWS, code, rows, STEPS[like.dtype], *places)
            return context.get_dummy_value()

        return types.void(like, *[types.intp] * 8), codegen

    return tile


def for_each_height(builder, highest: int, code, rows, *arguments) -> None:
    """Emit `code(builder, n, *arguments)` for n = 1 to `highest`, and a jump to the one for `rows`."""
    done = builder.append_basic_block("done")
    blocks = [builder.append_basic_block(f"rows{n}") for n in range(1, highest + 1)]
    switch = builder.switch(rows, blocks[-1])
    for n, block in enumerate(blocks, 1):
        switch.add_case(ir.Constant(rows.type, n), block)
        builder.position_at_end(block)
        code(builder, n, *arguments)
        builder.branch(done)
    builder.position_at_end(done)


def make_grouped_tile(fold_group):
    """The intrinsic tile(rows, a, lda, scales, lds, b, b_scales, groups, c, ldc): addresses, strides in bytes.

    1 <= rows <= GROUPED_ROWS, groups >= 1. a: int8, GROUP values a group. scales: for each row and group 16 bytes: the
    activation's scale s (float32), -128 times the sum of the group's a (int32), and s times the sum of each half of
    the group (two float32).
    b, int8: weights + 128 as uint8, in fours along K. The 128 is taken out by starting the sums at -128 sum(a); the
    scale of a weight's column is left to the caller, and b_scales is not read.
    b, int4: weights 0..15, two steps in a byte, the first in its low half; b_scales: for each WEIGHT_GROUP a row of
    bfloat16 scales and one of offsets, PANEL each: the weight is q * scale + offset.
    """

    def code(builder, rows, a, lda, scales, lds, b, b_scales, groups, c, ldc):
        def size(n: int):
            return ir.Constant(a.type, n)

        def row(start, stride, r: int):
            return builder.add(start, builder.mul(stride, size(r)))

        def group(g, accumulators):
            a_rows = [builder.add(row(a, lda, r), builder.mul(g, size(GROUP))) for r in range(rows)]
            s_rows = [builder.add(row(scales, lds, r), builder.mul(g, size(SCALES_BYTES))) for r in range(rows)]
            return fold_group(builder, size, g, a_rows, s_rows, b, b_scales, accumulators)

        sums = repeat(builder, groups, group, [ir.Constant(FLOATS, None)] * (rows * PANEL_VECTORS))
        for i, total in enumerate(sums):
            at = size(i % PANEL_VECTORS * VECTOR_BYTES)
            store(builder, total, builder.add(row(c, ldc, i // PANEL_VECTORS), at), 4)

    @intrinsic
    def tile(typingctx, rows, a, lda, scales, lds, b, b_scales, groups, c, ldc):
        def codegen(context, builder, signature, args):
            for_each_height(builder, GROUPED_ROWS, code, *args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 10), codegen

    return tile


def _integer_steps(builder, size, steps: int, a_rows, load_b, per_load: int, start):
    """Integer sums of `steps` steps; load_b(builder, size, i) gives the vectors of B for `per_load` steps together."""

    def step(i, sums):
        b_steps = load_b(builder, size, i)
        for j, b_k in enumerate(b_steps):
            k = builder.add(builder.mul(i, size(4 * per_load)), size(4 * j))
            new = []
            for r, a_row in enumerate(a_rows):
                a_k = broadcast(builder, load(builder, builder.add(a_row, k), I32, 4))
                for v in range(PANEL_VECTORS):
                    new.append(_step_int8(builder, a_k, b_k[v], sums[r * PANEL_VECTORS + v]))
            sums = new
        return sums

    return repeat(builder, size(steps // per_load), step, start)


def _grouped_load(a_rows):
    """How B is read. With more rows there is time enough, and no room for more instructions: 5 % slower."""
    return _load_ahead if len(a_rows) == 1 else lambda builder, address, align: load(builder, address, INTS, align)


def _int8_group(builder, size, g, a_rows, s_rows, b, b_scales, accumulators):
    b_group, load_b_vector = builder.add(b, builder.mul(g, size(GROUP * PANEL))), _grouped_load(a_rows)

    def load_b(builder, size, i):
        start = builder.add(b_group, builder.mul(i, size(4 * PANEL)))
        return [[load_b_vector(builder, builder.add(start, size(v * VECTOR_BYTES)), 64) for v in range(PANEL_VECTORS)]]

    starts = [broadcast(builder, load(builder, builder.add(s, size(4)), I32, 4)) for s in s_rows]
    start = [value for value in starts for _ in range(PANEL_VECTORS)]
    sums = _integer_steps(builder, size, STEPS_PER_GROUP, a_rows, load_b, 1, start)
    scales = [broadcast(builder, load(builder, s, F32, 4)) for s in s_rows]
    return [
        multiply_add(builder, builder.sitofp(total, FLOATS), scales[i // PANEL_VECTORS], accumulators[i])
        for i, total in enumerate(sums)
    ]


def _int4_group(builder, size, g, a_rows, s_rows, b, b_scales, accumulators):
    scales = [broadcast(builder, load(builder, s, F32, 4)) for s in s_rows]
    parts = GROUP // WEIGHT_GROUP

    def add_part(part: int, totals):
        """Add one WEIGHT_GROUP of the group."""
        number = builder.add(builder.mul(g, size(parts)), size(part))
        b_part = builder.add(b, builder.mul(number, size(WEIGHT_GROUP * PANEL // 2)))
        a_part = [builder.add(a_row, size(part * WEIGHT_GROUP)) for a_row in a_rows]
        zeros = [ir.Constant(INTS, None)] * (len(a_rows) * PANEL_VECTORS)
        sums = _integer_steps(builder, size, WEIGHT_GROUP // 4, a_part, _nibbles_of(b_part, a_rows), 2, zeros)
        b_scale, b_offset = _scales_and_offsets(builder, size, number, b_scales)
        a_sums = [broadcast(builder, load(builder, builder.add(s, size(8 + 4 * part)), F32, 4)) for s in s_rows]
        new = []
        for i, total in enumerate(sums):
            r, v = divmod(i, PANEL_VECTORS)
            scaled = builder.fmul(builder.sitofp(total, FLOATS), scales[r])
            without_offset = multiply_add(builder, scaled, b_scale[v], totals[i])
            new.append(multiply_add(builder, a_sums[r], b_offset[v], without_offset))
        return new

    return functools.reduce(lambda totals, part: add_part(part, totals), range(parts), accumulators)


def _nibbles_of(b, a_rows):
    """load_b of `_integer_steps` for int4: the two steps that a byte holds."""
    load_b_vector = _grouped_load(a_rows)

    def load_b(builder, size, i):
        start = builder.add(b, builder.mul(i, size(4 * PANEL)))
        both = [load_b_vector(builder, builder.add(start, size(v * VECTOR_BYTES)), 64) for v in range(PANEL_VECTORS)]
        nibbles, four = ir.Constant(INTS, [0x0F0F0F0F] * LANES), ir.Constant(INTS, [4] * LANES)
        low = [builder.and_(x, nibbles) for x in both]
        return [low, [builder.and_(builder.lshr(x, four), nibbles) for x in both]]

    return load_b


def _scales_and_offsets(builder, size, number, b_scales):
    """The float32 scales and offsets of a panel's WEIGHT_GROUP, PANEL_VECTORS vectors each."""
    row = builder.add(b_scales, builder.mul(number, size(WEIGHT_SCALES_BYTES)))
    places = [builder.add(row, size(2 * i * LANES)) for i in range(2 * PANEL_VECTORS)]
    vectors = [builder.bitcast(_load_widened(builder, at), FLOATS) for at in places]
    return vectors[:PANEL_VECTORS], vectors[PANEL_VECTORS:]


# Module-level names: a cached kernel cannot reach an intrinsic through a closure.
panel_tile = make_tile(PANEL_VECTORS)
panel_add = make_tile(PANEL_VECTORS, adds=True)
strip_add = make_tile(1, adds=True)
panel_tile_int8 = make_grouped_tile(_int8_group)
panel_tile_int4 = make_grouped_tile(_int4_group)
