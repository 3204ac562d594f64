"""Panels: their layout, aligned memory, prefetching, and the last steps of a tile's rows."""

import contextlib
import math
import mmap

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .vector_ir import (
    FLOATS,
    I64,
    LANES,
    VECTOR_BYTES,
    at,
    load,
    prefetch,
    repeat,
    rows_at,
    store,
    times,
)

PANEL_VECTORS = 4
ROW_BYTES = PANEL_VECTORS * VECTOR_BYTES  # of a panel: a step of all its columns
SCALE_GROUP = 64  # values of K that share an activation's scale
WEIGHT_GROUP = 32  # values of K that share an int4 weight's scale and offset
SCALES_BYTES = 4 * 4  # of a row's group in Int8Operand.scales
WEIGHT_SCALES_BYTES = (
    2 * PANEL_VECTORS * LANES * 2
)  # of a panel's WEIGHT_GROUP: bfloat16 scales, then offsets


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
        part = builder.udiv(spacing, ir.Constant(spacing.type, strips // lines))
        ask_ahead(builder, ahead, part, number, 1)


def zeros(shape: tuple[int, ...], dtype=np.float32) -> np.ndarray:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + VECTOR_BYTES, np.uint8)
    start = -raw.ctypes.data % VECTOR_BYTES
    return raw[start : start + size].view(dtype).reshape(shape)


def untouched(shape: tuple[int, ...], dtype) -> np.ndarray:
    """Return zeros in pages of 4 KB: in NumPy's huge pages a KV cache would take 80 MB at once."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    try:
        pages = mmap.mmap(-1, size, **private)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size} bytes cannot be reserved") from error
    with contextlib.suppress(AttributeError, OSError):  # without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(shape)


def row_vectors(builder, start):
    return [at(builder, start, v, VECTOR_BYTES) for v in range(PANEL_VECTORS)]


def load_row(builder, start):
    return [load(builder, place, FLOATS, 4) for place in row_vectors(builder, start)]


def store_each(builder, values, places) -> None:
    for value, place in zip(values, places, strict=True):
        store(builder, value, place, 4)


def make_rows(adds: bool):
    """Return the intrinsic rows(target, stride, y, count, scales, biases): target = y * scales + biases, or +=.

    Addresses; count >= 1; y has no gaps and may be the target. Scales of 1 or biases of -0 change nothing.
    """

    @intrinsic
    def rows(typingctx, target, stride, y, count, scales, biases):
        def codegen(context, builder, signature, args):
            target, stride, y, count, scales, biases = args
            scales = load_row(builder, scales)
            biases = load_row(builder, biases)

            def finish(i, _):
                values = load_row(builder, at(builder, y, i, ROW_BYTES))
                places = row_vectors(builder, builder.add(target, builder.mul(i, stride)))
                for value, scale, bias, place in zip(values, scales, biases, places, strict=True):
                    result = builder.fadd(builder.fmul(value, scale), bias)
                    result = builder.fadd(load(builder, place, FLOATS, 4), result) if adds else result
                    store(builder, result, place, 4)
                return []

            repeat(builder, count, finish, [])
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), codegen

    return rows


def make_segments_sum(segments: int):
    """Return the intrinsic total(y, spacing, count, scales): y * scales of segments, (s0 + s1) + (s2 + s3).

    Segments lie `spacing` bytes apart. count >= 1.
    """

    @intrinsic
    def total(typingctx, y, spacing, count, scales):
        def codegen(context, builder, signature, args):
            y, spacing, count, scales = args
            scales = load_row(builder, scales)

            def add_up(i, _):
                first = at(builder, y, i, ROW_BYTES)
                rows = [load_row(builder, start) for start in rows_at(builder, first, spacing, segments)]
                rows = [[builder.fmul(*pair) for pair in zip(row, scales, strict=True)] for row in rows]
                while len(rows) > 1:
                    rows = [
                        [builder.fadd(*pair) for pair in zip(*rows[s : s + 2], strict=True)]
                        for s in range(0, len(rows), 2)
                    ]
                store_each(builder, rows[0], row_vectors(builder, first))
                return []

            repeat(builder, count, add_up, [])
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), codegen

    return total


# Module-level names, see tiles.py.
put_rows = make_rows(adds=False)
add_rows = make_rows(adds=True)
sum_2_segments = make_segments_sum(2)
sum_4_segments = make_segments_sum(4)


def part_rows(builder, number, part_bytes: int, parts: int, values, scales):
    """Return where rows have a part of their int8 values, of which a group has `parts`, and the group's scales."""
    offset = times(builder, number, part_bytes)
    scales_offset = times(builder, builder.udiv(number, ir.Constant(I64, parts)), SCALES_BYTES)
    rows = [builder.add(start, offset) for start in values]
    return rows, [builder.add(start, scales_offset) for start in scales]
