"""From float32 rows to what the tiles multiply: the activations of the next product, quantised per token."""

import numpy as np
from numba.extending import overload

from tinygpt.kernels.cpu.formats import BFloat16Operand, Float32Operand, Int8Operand, is_a
from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.team import claim, complete, finish_phase
from tinygpt.kernels.cpu.tiles import GROUP, WEIGHT_GROUP
from tinygpt.kernels.cpu.vector_ir import fma

ROUNDING = np.float32(12582912.0)  # 1.5 * 2**23: adding it leaves the nearest whole number in the low bits
HALF_WAY, ONE_BIT, SIXTEEN = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)
LARGEST = np.float32(127)
ROWS_PER_ITEM = 4


@jit
def to_bfloat16(x):
    """The nearest bfloat16's bits, ties to even; NaN stays NaN."""
    bits = np.float32(x).view(np.uint32)
    rounded = (bits + HALF_WAY + ((bits >> SIXTEEN) & ONE_BIT)) >> SIXTEEN
    return np.uint16(rounded) if x == x else np.uint16(0x7FC0)


@jit
def from_bfloat16(bits):
    return np.uint32(np.uint32(bits) << SIXTEEN).view(np.float32)


def put(operand, row, first, values):
    """Put float32 values (n,) into columns first to first + n of a row; `first` is a multiple of GROUP."""
    raise NotImplementedError


@overload(put)
def _put(operand, row, first, values):
    if is_a(operand, Float32Operand):
        return lambda operand, row, first, values: _put_float32(operand.values[row], first, values)
    if is_a(operand, BFloat16Operand):
        return lambda operand, row, first, values: _put_bfloat16(operand.values[row], first, values)
    if is_a(operand, Int8Operand):
        return _put_int8
    return None


@jit
def _put_float32(target, first, values):
    for i in range(values.size):
        target[first + i] = values[i]


@jit
def _put_bfloat16(target, first, values):
    for i in range(values.size):
        target[first + i] = to_bfloat16(values[i])


def _put_int8(operand, row, first, values):
    for start in range(0, values.size, GROUP):
        group = values[start : start + GROUP]
        column = first + start
        quantise(
            group,
            operand.values[row, column : column + group.size],
            operand.scales[row, column // GROUP],
            operand.zero_points[row, column // GROUP],
        )


@jit
def quantise(x, target, scales, zero_points):
    """x (n,), n <= GROUP, to int8 with one scale: the largest size becomes 127. A row of zeros has scale 0."""
    largest = np.float32(0)
    for i in range(x.size):
        largest = max(largest, abs(x[i]))
    inverse = LARGEST / largest if largest > 0 else np.float32(0)
    low = high = np.int32(0)
    for i in range(x.size):
        target[i] = np.int32(fma(x[i], inverse, ROUNDING) - ROUNDING)
    for i in range(min(x.size, WEIGHT_GROUP)):
        low += np.int32(target[i])
    for i in range(WEIGHT_GROUP, x.size):
        high += np.int32(target[i])
    scale = largest / LARGEST
    scales[0] = scale
    zero_points[1] = np.int32(-128) * (low + high)
    scales[2] = scale * np.float32(low)
    scales[3] = scale * np.float32(high)


def convert(team, operand, x):
    """Put the rows of x (N, K) into the operand. A phase, unless the operand is made of x itself."""
    raise NotImplementedError


@overload(convert)
def _convert(team, operand, x):
    if is_a(operand, Float32Operand):
        return lambda team, operand, x: None
    return _convert_rows


def _convert_rows(team, operand, x):
    items = max((x.shape[0] + ROWS_PER_ITEM - 1) // ROWS_PER_ITEM, 1)
    item = claim(team, items)
    while item >= 0:
        for n in range(item * ROWS_PER_ITEM, min((item + 1) * ROWS_PER_ITEM, x.shape[0])):
            put(operand, n, 0, x[n])
        complete(team, items)
        item = claim(team, items)
    finish_phase(team)
