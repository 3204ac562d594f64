"""Operands: the left side of the next product, rounded or quantized per token."""

import functools
from typing import NamedTuple

import numpy as np
from llvmlite import ir

from ...numbers import BFLOAT16_NAN, INFINITE_BITS, LEVELS, ROUNDING, SIZE_BITS
from ..jit import kernel, overload_by_dtype
from ..simd.targets import TARGET
from ..simd.tiles import OUT_TILE
from ..simd.vector_ir import (
    F32,
    FLOATS,
    I32,
    INTS,
    LANES,
    ROUNDING_BITS,
    ROW_BYTES,
    SCALE_GROUP,
    SCALES_BYTES,
    VECTOR_BYTES,
    add_int,
    address,
    at,
    broadcast,
    declare,
    emits_by_dtype,
    float32_at,
    fold,
    load,
    load_row,
    maximum_int,
    multiply_add,
    put_rows,
    repeat,
    splat,
    store,
    uint16_at,
    zeros,
)
from ..team import claim_rows, complete_rows, finish_phase

HALF_WAY = np.uint32(0x7FFF)
ONE_BIT = np.uint32(1)
SIXTEEN = np.uint32(16)
LEAST_GROUP = 2.0**-120  # a smaller group is zeros: 127 / largest must stay finite


class Float32Operand(NamedTuple):
    values: np.ndarray  # (N, K) float32


class BFloat16Operand(NamedTuple):
    values: np.ndarray  # (N, K rounded up to 2) uint16, or float32 with bfloat16's precision


class Int8Operand(NamedTuple):
    """x[n, k] = values[n, k] * scales[n, k / SCALE_GROUP, 0], quantized per token."""

    values: np.ndarray  # (N, K rounded up to SCALE_GROUP) int8, or int16: see targets.py
    # (N, G, 4) float32: scale; -128 times the group's sum (int32 bits); scale times the sum of each half
    scales: np.ndarray


def new_float32_operand(n: int, k: int) -> Float32Operand:
    return Float32Operand(zeros((n, k)))


def new_bfloat16_operand(n: int, k: int) -> BFloat16Operand:
    return BFloat16Operand(zeros((n, k + k % 2), np.uint16 if TARGET.packs_bfloat16 else np.float32))


def new_int8_operand(value_bytes: int, n: int, k: int) -> Int8Operand:
    groups = -(-k // SCALE_GROUP)
    return Int8Operand(zeros((n, groups * SCALE_GROUP), np.dtype(f"i{value_bytes}")), zeros((n, groups, 4)))


@kernel
def to_bfloat16(x):
    """Return the nearest bfloat16's bits as numbers.to_bfloat16 does, ties to even."""
    bits = np.float32(x).view(np.uint32)
    rounded = (bits + HALF_WAY + ((bits >> SIXTEEN) & ONE_BIT)) >> SIXTEEN
    return np.uint16(rounded) if x == x else BFLOAT16_NAN


@kernel
def from_bfloat16(bits):
    return np.uint32(np.uint32(bits) << SIXTEEN).view(np.float32)


@kernel
def rounded_to_bfloat16(x):
    return from_bfloat16(to_bfloat16(x))


def _put_float32(operand, row, first, values):
    target = float32_at(address(operand.values) + (row * operand.values.shape[1] + first) * 4, values.size)
    for i in range(values.size):
        target[i] = values[i]


def _put_bfloat16(operand, row, first, values):
    target = uint16_at(address(operand.values) + (row * operand.values.shape[1] + first) * 2, values.size)
    for i in range(values.size):
        target[i] = to_bfloat16(values[i])


def _put_widened(operand, row, first, values):
    target = float32_at(address(operand.values) + (row * operand.values.shape[1] + first) * 4, values.size)
    for i in range(values.size):
        target[i] = rounded_to_bfloat16(values[i])


def _put_int8(operand, row, first, values):
    like = operand.values
    size = operand.values.itemsize
    target = address(like) + (row * like.shape[1] + first) * size
    scales = address(operand.scales) + (row * operand.scales.shape[1] + first // SCALE_GROUP) * SCALES_BYTES
    if values.size == SCALE_GROUP:  # a product's panel
        quantize_group(like, address(values), target, scales)
        return
    whole = values.size // SCALE_GROUP
    for g in range(whole):
        source = address(values) + g * SCALE_GROUP * 4
        place = target + g * SCALE_GROUP * size
        quantize_group(like, source, place, scales + g * SCALES_BYTES)
    rest = values.size - whole * SCALE_GROUP
    if rest:  # zeros fill the group
        done = whole * SCALE_GROUP
        quantize_part(
            like, address(values) + done * 4, rest, target + done * size, scales + whole * SCALES_BYTES
        )


# put stores float32 values (n,) from column `first`, a multiple of SCALE_GROUP.
_put_rounded = _put_bfloat16 if TARGET.packs_bfloat16 else _put_widened
put = overload_by_dtype({Float32Operand: _put_float32, BFloat16Operand: _put_rounded, Int8Operand: _put_int8})


def _put_rows_int8(operand, row, first, rows, x, factors, summands):
    like = operand.values
    stride = like.shape[1] * like.itemsize
    scales_stride = operand.scales.shape[1] * SCALES_BYTES
    target = address(like) + row * stride + first * like.itemsize
    scales = address(operand.scales) + row * scales_stride + first // SCALE_GROUP * SCALES_BYTES
    quantize_rows(like, x, rows, factors, summands, target, stride, scales, scales_stride)


def _put_rows(operand, row, first, rows, x, factors, summands):
    put_rows(x, ROW_BYTES, x, rows, factors, summands)
    for r in range(rows):
        put(operand, row + r, first, float32_at(x + r * ROW_BYTES, OUT_TILE))


# put_panel stores x * factors + summands, `rows` rows of a panel; all are addresses.
put_panel = overload_by_dtype({Int8Operand: _put_rows_int8}, otherwise=_put_rows)


@emits_by_dtype(3)
def quantize_group(builder, dtype, x, target, scales):
    """Quantize SCALE_GROUP float32 values at x: the largest size becomes 127, zeros have scale 0.

    The array is the operand's values. A value that is not finite makes the scale NaN.
    """
    values = [load(builder, place, FLOATS) for place in _vectors_at(builder, x)]
    _quantize(builder, values, _whole_number(dtype), target, scales)


@emits_by_dtype(8)
def quantize_rows(builder, dtype, x, count, factors, summands, target, stride, scales, scales_stride):
    """Quantize rows of x * factors + summands as quantize_group, SCALE_GROUP float32 each."""
    kind = _whole_number(dtype)
    factors = load_row(builder, factors)
    summands = load_row(builder, summands)

    def row(i, _):
        values = load_row(builder, at(builder, x, i, SCALE_GROUP * 4))
        values = [
            builder.fadd(builder.fmul(v, f), s) for v, f, s in zip(values, factors, summands, strict=True)
        ]
        place, scale = (
            builder.add(a, builder.mul(i, b)) for a, b in ((target, stride), (scales, scales_stride))
        )
        _quantize(builder, values, kind, place, scale)

    repeat(builder, count, row)


@emits_by_dtype(4)
def quantize_part(builder, dtype, x, count, target, scales):
    """Quantize `count` values, and zeros that fill the group."""
    kinds = [FLOATS.as_pointer(), I32, ir.VectorType(ir.IntType(1), LANES), FLOATS]
    load_some = declare(builder, f"llvm.masked.load.v{LANES}f32.p0", FLOATS, kinds)
    counts = broadcast(builder, builder.trunc(count, I32))
    values = []
    for i, place in enumerate(_vectors_at(builder, x)):
        is_given = builder.icmp_signed("<", INTS(list(range(i * LANES, (i + 1) * LANES))), counts)
        place = builder.inttoptr(place, FLOATS.as_pointer())
        values.append(builder.call(load_some, [place, I32(4), is_given, FLOATS(None)]))
    _quantize(builder, values, _whole_number(dtype), target, scales)


def _whole_number(dtype: str) -> ir.IntType:
    return ir.IntType(8 * np.dtype(dtype).itemsize)


def _vectors_at(builder, start):
    return [at(builder, start, i, VECTOR_BYTES) for i in range(SCALE_GROUP // LANES)]


def _quantize(builder, values, kind, target, scales) -> None:
    # Sizes are in the order of their bits: infinity and NaN are larger than all others.
    sizes = [builder.and_(builder.bitcast(v, INTS), splat(INTS, SIZE_BITS)) for v in values]
    largest_bits = fold(
        builder, functools.reduce(functools.partial(maximum_int, builder), sizes), maximum_int
    )
    largest = builder.bitcast(largest_bits, F32)
    zero = F32(0.0)
    limit = F32(LEVELS)
    is_zero = builder.fcmp_ordered("<", largest, F32(LEAST_GROUP))
    inverse = broadcast(builder, builder.select(is_zero, zero, builder.fdiv(limit, largest)))
    sums = []
    for i, value in enumerate(values):
        nearest = multiply_add(builder, value, inverse, splat(FLOATS, ROUNDING))
        whole = builder.sub(builder.bitcast(nearest, INTS), splat(INTS, int(ROUNDING_BITS)))
        place = at(builder, target, i, LANES * kind.width // 8)
        store(builder, builder.trunc(whole, ir.VectorType(kind, LANES)), place, 1)
        sums.append(whole)
    half = len(sums) // 2
    low, high = (fold(builder, builder.add(*part), add_int) for part in (sums[:half], sums[half:]))
    is_finite = builder.icmp_signed("<", largest_bits, I32(INFINITE_BITS))
    scale = builder.select(is_zero, zero, builder.fdiv(largest, limit))
    scale = builder.select(is_finite, scale, F32(float("nan")))
    store(builder, scale, scales)
    store(builder, builder.mul(builder.add(low, high), I32(-128)), at(builder, scales, 4))
    store(builder, builder.fmul(scale, builder.sitofp(low, F32)), at(builder, scales, 8))
    store(builder, builder.fmul(scale, builder.sitofp(high, F32)), at(builder, scales, 12))


def _quantize_rows(team, operand, x, factors, layer):
    first, last = claim_rows(team, x.shape[0])
    while first >= 0:
        for n in range(first, last):
            row = float32_at(address(x) + n * x.shape[1] * 4, x.shape[1])
            if factors.size > 0:
                scaled = float32_at(address(team.scratch), x.shape[1])
                for k in range(x.shape[1]):
                    scaled[k] = row[k] * factors[layer, k]
                row = scaled
            put(operand, n, 0, row)
        complete_rows(team, x.shape[0])
        first, last = claim_rows(team, x.shape[0])
    finish_phase(team)


def _leave_rows(team, operand, x, factors, layer):
    pass


# quantize_activations stores x (N, K) times a layer's factors. A phase, unless the operand is x itself.
quantize_activations = overload_by_dtype({Float32Operand: _leave_rows}, otherwise=_quantize_rows, argument=1)
