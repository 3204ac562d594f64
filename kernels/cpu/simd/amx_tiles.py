"""Tiles of Intel's AMX: up to 16 rows of A by a panel's 64 columns of B, in registers of 16 rows of 64 bytes.

A block is 4 KB of a panel, as AMX reads it: 32 bfloat16 or 64 int8 of K. Of bfloat16, the even k of a block are a chain
from 0, and so are the odd; their sum is added to C. Sums of int8 are exact.
"""

from llvmlite import ir

from .tiles import CHUNK_BYTES, LINE_BYTES
from .vector_ir import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    PANEL_VECTORS,
    ROW_BYTES,
    SCALES_BYTES,
    VECTOR_BYTES,
    ask_ahead,
    at,
    declare,
    emits,
    load,
    load_to_lanes,
    multiply_add,
    repeat,
    row_vectors,
    store,
    times,
)

AMX_ROWS, A_BYTES = 16, 64  # of a register; a row's bytes of a block
BLOCK_BYTES = AMX_ROWS * ROW_BYTES
CHUNK = CHUNK_BYTES // BLOCK_BYTES  # blocks that several tiles share in the L1 cache
CONFIG_BYTES = 64
A, B = 4, (5, 6)  # registers; 0 to 3 have C, by vectors of columns


@emits("void", *["intp"] * 6)
def amx_bfloat16(builder, rows, a, lda, b, steps, c):
    """C (rows, OUT_TILE) += A @ B: addresses, a byte stride; steps of a pair of K."""
    blocks = builder.udiv(steps, I64(AMX_ROWS))
    rest = builder.urem(steps, I64(AMX_ROWS))

    def take(row, first, count, height, ask):
        c_row = at(builder, c, row, ROW_BYTES)
        a_row = builder.add(a, builder.mul(row, lda))
        _each_column(builder, "tileloadd64", c_row)

        def block(i, _):
            number = builder.add(first, i)
            a_block = at(builder, a_row, number, A_BYTES)
            b_block = at(builder, b, number, BLOCK_BYTES)
            _multiply(builder, "tdpbf16ps", a_block, lda, b_block)
            ask(b_block)

        repeat(builder, count, block)
        _each_column(builder, "tilestored64", c_row)

    _for_each_tile(builder, rows, I64(AMX_ROWS), I64(0), blocks, take)
    with builder.if_then(builder.icmp_signed(">", rest, I64(0))):
        _for_each_tile(builder, rows, rest, blocks, I64(1), take)
    _call(builder, "tilerelease")


@emits("void", *["intp"] * 8)
def amx_int8(builder, rows, a, lda, scales, lds, b, groups, c):
    """C (rows, OUT_TILE) += A @ B, as grouped_tiles.make_grouped_tile."""
    sums = _scratch(builder, BLOCK_BYTES)

    def take(row, first, count, height, ask):
        a_row, scales_row = (
            builder.add(x, builder.mul(row, stride)) for x, stride in ((a, lda), (scales, lds))
        )

        def group(i, _):
            number = builder.add(first, i)
            for v in range(PANEL_VECTORS):
                _call(builder, "tilezero", I8(v))
            b_group = at(builder, b, number, BLOCK_BYTES)
            _multiply(builder, "tdpbsud", at(builder, a_row, number, A_BYTES), lda, b_group)
            _each_column(builder, "tilestored64", sums)

            def fold(r, _):
                place = at(builder, builder.add(scales_row, builder.mul(r, lds)), number, SCALES_BYTES)
                scale = load_to_lanes(builder, place, F32)
                first_sum = load_to_lanes(builder, at(builder, place, 4), I32)
                totals = row_vectors(builder, at(builder, c, builder.add(row, r), ROW_BYTES))
                for v, total in enumerate(totals):
                    sum_at = at(builder, at(builder, sums, r, ROW_BYTES), v, VECTOR_BYTES)
                    products = load(builder, sum_at, INTS, 64)
                    whole = builder.sitofp(builder.add(products, first_sum), FLOATS)
                    new = multiply_add(builder, whole, scale, load(builder, total, FLOATS))
                    store(builder, new, total)

            repeat(builder, height, fold)
            ask(b_group)

        repeat(builder, count, group)

    _for_each_tile(builder, rows, I64(AMX_ROWS), I64(0), groups, take)
    _call(builder, "tilerelease")


def _for_each_tile(builder, rows, height, first, blocks, take) -> None:
    """Emit take(row, first block, blocks, rows, ask) of tiles of AMX_ROWS, chunk by chunk, and of the rows that remain.

    height: rows of B in a block. ask(block of B) prefetches a tile's part of the block a chunk later.
    """
    whole = builder.udiv(rows, I64(AMX_ROWS))
    rest = builder.urem(rows, I64(AMX_ROWS))
    has_whole, has_rest = (builder.icmp_signed(">", x, I64(0)) for x in (whole, rest))
    lines = builder.udiv(I64(BLOCK_BYTES // LINE_BYTES), builder.select(has_whole, whole, I64(1)))

    def ask_part(block, number):
        part = at(builder, at(builder, block, CHUNK_BYTES), builder.mul(number, lines), LINE_BYTES)
        repeat(builder, lines, lambda i, _: ask_ahead(builder, part, I64(LINE_BYTES), i, 1))

    def take_chunk(i, _):
        before = times(builder, i, CHUNK)
        left = builder.sub(blocks, before)
        count = builder.select(builder.icmp_signed("<", left, I64(CHUNK)), left, I64(CHUNK))

        def tile(number, _):
            row = times(builder, number, AMX_ROWS)
            start = builder.add(first, before)
            take(row, start, count, I64(AMX_ROWS), lambda block: ask_part(block, number))

        repeat(builder, whole, tile)

    with builder.if_then(builder.icmp_signed(">", blocks, I64(0))):
        with builder.if_then(has_whole):
            _configure(builder, I64(AMX_ROWS), height)
            repeat(builder, builder.udiv(at(builder, blocks, CHUNK - 1), I64(CHUNK)), take_chunk)
        with builder.if_then(has_rest):
            _configure(builder, rest, height)
            row = times(builder, whole, AMX_ROWS)
            take(row, first, blocks, rest, lambda block: ask_part(block, I64(0)))


def _configure(builder, rows, height) -> None:
    """Set registers' shapes: A and C have `rows` rows, B has `height`, of four bytes of K each."""
    config = _scratch(builder, CONFIG_BYTES)
    store(builder, ir.VectorType(I8, CONFIG_BYTES)([1] + [0] * (CONFIG_BYTES - 1)), config, 64)
    for register in range(B[-1] + 1):
        size = times(builder, height, 4) if register == A else I64(VECTOR_BYTES)
        store(builder, builder.trunc(size, I16), at(builder, config, 16 + 2 * register), 2)
        shown = builder.trunc(height if register in B else rows, I8)
        store(builder, shown, at(builder, config, 48 + register), 1)
    _call(builder, "ldtilecfg", _pointer(builder, config))


def _multiply(builder, name: str, a, lda, b) -> None:
    _call(builder, "tileloadd64", I8(A), _pointer(builder, a), lda)
    for v, place in enumerate(row_vectors(builder, b)):
        register = I8(B[v % len(B)])
        _call(builder, "tileloadd64", register, _pointer(builder, place), I64(ROW_BYTES))
        _call(builder, name, I8(v), I8(A), register)


def _each_column(builder, name: str, c) -> None:
    for v, place in enumerate(row_vectors(builder, c)):
        _call(builder, name, I8(v), _pointer(builder, place), I64(ROW_BYTES))


def _call(builder, name: str, *arguments) -> None:
    builder.call(declare(builder, f"llvm.x86.{name}", ir.VoidType(), [x.type for x in arguments]), arguments)


def _scratch(builder, size: int):
    with builder.goto_entry_block():
        place = builder.alloca(ir.ArrayType(I8, size))
    place.align = VECTOR_BYTES
    return builder.ptrtoint(place, I64)


def _pointer(builder, address):
    return builder.inttoptr(address, I8.as_pointer())
