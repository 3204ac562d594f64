"""Micro-kernels as LLVM vector IR in Numba intrinsics, on raw addresses.

A tile multiplies R rows of A by N*16 columns of B, over K in steps, into C (float32). Each output is one chain in the
order of k, whatever R and N are: a row's bits do not depend on its batch. A step loads N vectors of B and broadcasts 4
bytes of each row of A; R*N accumulators stay in registers. With too few, a tile goes over its columns in strips.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tinygpt.kernels.cpu.simd.cache_tiles import make_integer_code
from tinygpt.kernels.cpu.simd.lane_tiles import LANE_STEPS, make_lane_code
from tinygpt.kernels.cpu.simd.panels import PANEL_VECTORS, ask_ahead
from tinygpt.kernels.cpu.simd.steps import PARTS, strip_of
from tinygpt.kernels.cpu.simd.targets import TARGET
from tinygpt.kernels.cpu.simd.vector_ir import (
    FLOATS,
    I32,
    INTS,
    LANES,
    VECTOR_BYTES,
    broadcast,
    load,
    repeat,
    store,
)

OUT_TILE = PANEL_VECTORS * LANES
# 6 x 64: 24 accumulators, 4 vectors of B and one of A fill 29 of AVX-512's 32 registers; 6 x 16 fill 15 of AVX2's 16.
ROW_TILE = 6
IN_STRIPS = strip_of(ROW_TILE) < PANEL_VECTORS  # such a tile jumps through its panel
STEP_BYTES = 4  # of a column of B in a step
LINE_BYTES = 64
# Bytes by which B is prefetched: the hardware stops at each page of 4 KB. int4 came at 26 GB/s, and comes at 47.
AHEAD = 4096
CHUNK_BYTES = 24576  # of a panel: stays in the L1 cache for several tiles


def make_tile(vectors: int, adds: bool = True):
    """Return the intrinsic tile(like, rows, a, lda, b, ldb, steps, c, ldc, ahead, spacing): addresses, byte strides.

    C = A @ B, or += if it `adds`; 1 <= rows <= ROW_TILE, steps >= 1. The dtype of `like` is B's: float32, uint16
    (bfloat16 pairs) or uint8 (cache_tiles.py). Each step prefetches `vectors` lines from `ahead`, `spacing` apart.
    """

    @intrinsic
    def tile(typingctx, like, rows, a, lda, b, ldb, steps, c, ldc, ahead, spacing):
        def codegen(context, builder, signature, args):
            _, rows, *places = args
            for_each_height(builder, make_code(like.dtype, vectors, adds, vectors), rows, *places)
            return context.get_dummy_value()

        return types.void(like, *[types.intp] * 10), codegen

    return tile


@intrinsic
def panel_tile(typingctx, like, rows, vectors, a, lda, b, ldb, steps, c, ldc, ahead, spacing):
    """Compute the first `vectors` vectors of a panel's columns, without adding."""

    def codegen(context, builder, signature, args):
        _, rows, vectors, *places = args

        def take(width: int):
            for_each_height(builder, make_code(like.dtype, width, False, PANEL_VECTORS), rows, *places)

        select(builder, vectors, PANEL_VECTORS, take)
        return context.get_dummy_value()

    return types.void(like, *[types.intp] * 11), codegen


def make_code(dtype, vectors: int, adds: bool, wide: int):
    """Return code(builder, rows, a, lda, ...), which emits a tile of the first `vectors` of `wide` vectors."""
    if dtype == types.uint8:
        return make_integer_code(vectors, adds, wide)
    if TARGET.has_lanes:
        return make_lane_code(vectors, adds, wide, LANE_STEPS[dtype])
    return _make_code(vectors, adds, wide, PARTS[dtype])


def _make_code(vectors: int, adds: bool, wide: int, parts):
    def code(builder, rows: int, a, lda, b, ldb, steps, c, ldc, ahead, spacing):
        strip = strip_of(rows, vectors)

        def size(n: int):
            return ir.Constant(a.type, n)

        row_starts = [builder.add(a, builder.mul(lda, size(r))) for r in range(rows)]

        def take_strip(number, _):
            columns = builder.mul(number, size(strip * VECTOR_BYTES))
            b_strip, c_strip = builder.add(b, columns), builder.add(c, columns)

            def step(k, sums):
                first = builder.add(builder.mul(k, size(wide)), builder.mul(number, size(strip)))
                ask_ahead(builder, ahead, spacing, first, strip)
                b_row, a_step = builder.add(b_strip, builder.mul(k, ldb)), builder.mul(k, size(4 * len(parts)))
                b_k = [load(builder, builder.add(b_row, size(v * VECTOR_BYTES)), INTS, 32) for v in range(strip)]
                for part in parts:
                    taken, new = [part.take(builder, vector) for vector in b_k], []
                    for r in range(rows):
                        a_at = builder.add(builder.add(row_starts[r], a_step), size(part.a_offset))
                        a_k = broadcast(builder, load(builder, a_at, I32, 4))
                        new += [part.multiply(builder, a_k, taken[v], sums[r * strip + v]) for v in range(strip)]
                    sums = new
                return sums

            c_rows = [builder.add(c_strip, builder.mul(ldc, size(r))) for r in range(rows)]
            places = [builder.add(c_row, size(v * VECTOR_BYTES)) for c_row in c_rows for v in range(strip)]
            start = [load(builder, at, FLOATS, 4) if adds else ir.Constant(FLOATS, None) for at in places]
            for at, total in zip(places, repeat(builder, steps, step, start), strict=True):
                store(builder, total, at, 4)
            return []

        repeat(builder, size(vectors // strip), take_strip, [])

    return code


def for_each_height(builder, code, rows, *arguments) -> None:
    select(builder, rows, ROW_TILE, lambda n: code(builder, n, *arguments))


def select(builder, number, count: int, emit) -> None:
    """Emit `emit(n)` for n = 1 to `count`, and a jump to the one for `number`."""
    done = builder.append_basic_block("done")
    blocks = [builder.append_basic_block(f"case{n}") for n in range(1, count + 1)]
    switch = builder.switch(number, blocks[-1])
    for n, block in enumerate(blocks, 1):
        switch.add_case(ir.Constant(number.type, n), block)
        builder.position_at_end(block)
        emit(n)
        builder.branch(done)
    builder.position_at_end(done)


# Module-level names: a cached kernel cannot reach an intrinsic through a closure.
panel_add = make_tile(PANEL_VECTORS)
strip_add = make_tile(1)
