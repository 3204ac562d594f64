"""The last steps of a tile's result: rows of a panel, four vectors each, with what they share kept in registers."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tinygpt.kernels.cpu.simd.panels import PANEL_VECTORS, ROW_BYTES
from tinygpt.kernels.cpu.simd.vector_ir import FLOATS, VECTOR_BYTES, load, repeat, store


def _vectors(builder, start):
    """Where the vectors of a row lie that begins at `start`."""
    return [builder.add(start, ir.Constant(start.type, v * VECTOR_BYTES)) for v in range(PANEL_VECTORS)]


def load_row(builder, start):
    """The vectors of a row of a panel that begins at `start`."""
    return [load(builder, at, FLOATS, 4) for at in _vectors(builder, start)]


def make_rows(adds: bool):
    """The intrinsic rows(target, stride, y, count, scales, biases): target = y * scales + biases, or += if it `adds`.

    All are addresses; `stride` is the bytes from one row of the target to the next. The rows of y follow each other
    without gaps, and may be the target. count >= 1. A product and a sum are rounded one after the other. Hence a row of
    1 as scales, or of -0 as biases, changes nothing.
    """

    @intrinsic
    def rows(typingctx, target, stride, y, count, scales, biases):
        def codegen(context, builder, signature, args):
            target, stride, y, count, scales, biases = args
            scales, biases = load_row(builder, scales), load_row(builder, biases)

            def finish(i, _):
                values = load_row(builder, builder.add(y, builder.mul(i, ir.Constant(i.type, ROW_BYTES))))
                places = _vectors(builder, builder.add(target, builder.mul(i, stride)))
                for value, scale, bias, at in zip(values, scales, biases, places, strict=True):
                    result = builder.fadd(builder.fmul(value, scale), bias)
                    store(builder, builder.fadd(load(builder, at, FLOATS, 4), result) if adds else result, at, 4)
                return []

            repeat(builder, count, finish, [])
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), codegen

    return rows


def make_segments_sum(segments: int):
    """The intrinsic total(y, spacing, count, scales): rows y = y * scales, of all segments, as (s0 + s1) + (s2 + s3).

    A segment's rows lie `spacing` bytes behind those of the one before. count >= 1.
    """

    @intrinsic
    def total(typingctx, y, spacing, count, scales):
        def codegen(context, builder, signature, args):
            y, spacing, count, scales = args
            scales = load_row(builder, scales)

            def add_up(i, _):
                first = builder.add(y, builder.mul(i, ir.Constant(i.type, ROW_BYTES)))
                starts = [builder.add(first, builder.mul(spacing, ir.Constant(i.type, s))) for s in range(segments)]
                rows = [load_row(builder, start) for start in starts]
                rows = [[builder.fmul(*pair) for pair in zip(row, scales, strict=True)] for row in rows]
                while len(rows) > 1:
                    rows = [
                        [builder.fadd(*pair) for pair in zip(*rows[s : s + 2], strict=True)]
                        for s in range(0, len(rows), 2)
                    ]
                for value, at in zip(rows[0], _vectors(builder, first), strict=True):
                    store(builder, value, at, 4)
                return []

            repeat(builder, count, add_up, [])
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), codegen

    return total


# Module-level names, see tiles.py.
put_rows, add_rows = make_rows(adds=False), make_rows(adds=True)
sum_2_segments, sum_4_segments = make_segments_sum(2), make_segments_sum(4)
