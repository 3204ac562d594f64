"""Attention over an int8 KV cache: quantizing keys, values, queries and softmax weights.

Keys, values and queries have a scale each, largest size / 127. A block's softmax weights, times their values' scales,
share a scale, largest / WEIGHT_LEVELS. So a block is quantized alike in every step, and its products are whole numbers.
A byte of the cache is a number + 128; after the D / 4 steps of a key come the float32 scales of key and value.
"""

import numpy as np

from ...numbers import LEAST_ROW, LEVELS
from ..jit import kernel
from ..simd.tiles import (
    HEADER_BYTES,
    HIGH_BITS,
    IN_FOURS,
    OUT_TILE,
    PLANE_BYTES,
    SCORE_STEP_BYTES,
    STEP_BYTES,
)
from ..simd.vector_ir import (
    ROUNDING,
    ROUNDING_BITS,
    address,
    float32_at,
    fma,
    int16_at,
    int32_at,
    uint8_at,
    uint32_at,
)
from .activations import ZERO

PER_STEP = 4  # values
SCALE_STEPS = 2
WEIGHT_LEVELS = np.float32(2**14 - 1)
SIZE = np.uint32(0x7FFFFFFF)
BYTE = np.uint32(0xFF)
OFFSET = np.uint32(0x80)
INFINITE = np.float32(np.inf)
NAN = np.float32(np.nan)
LOW = np.int32(2**HIGH_BITS - 1)
COLUMN_STEP_BYTES = OUT_TILE * STEP_BYTES  # from one step of a key to the next
query_at = uint8_at if IN_FOURS else int16_at
LEAST_QUERY = 4  # float32 values, besides D, that make room for any query


def steps_of_key(cache):
    return cache.shape[3] - SCALE_STEPS


def bytes_of_query(cache):
    return HEADER_BYTES + (cache.shape[3] - SCALE_STEPS) * SCORE_STEP_BYTES


def put_key(cache, column, x):
    scale, inverse = _scales(_largest(x), LEVELS)
    whole, at = x.size // PER_STEP, column
    for i in range(whole):
        first = PER_STEP * i
        low = np.uint32(_byte(x[first], inverse) | (_byte(x[first + 1], inverse) << np.uint32(8)))
        high = np.uint32(_byte(x[first + 2], inverse) | (_byte(x[first + 3], inverse) << np.uint32(8)))
        uint32_at(at, 1)[0] = np.uint32(low | np.uint32(high << np.uint32(16)))
        at += COLUMN_STEP_BYTES
    if whole * PER_STEP < x.size:
        for d in range(whole * PER_STEP, x.size):
            uint8_at(at, PER_STEP)[d - whole * PER_STEP] = np.uint8(_byte(x[d], inverse))
        at += COLUMN_STEP_BYTES
    float32_at(at, 1)[0] = scale


def put_value(cache, start, position, x, column):
    scale, inverse = _scales(_largest(x), LEVELS)
    shift = np.uint32(8 * (position % PER_STEP))
    others = np.uint32(~np.uint32(BYTE << shift))
    words = uint32_at(start + position // PER_STEP * cache.strides[3], x.size)
    for d in range(x.size):
        words[d] = np.uint32(words[d] & others) | np.uint32(_byte(x[d], inverse) << shift)
    float32_at(column + (_steps(x) + 1) * COLUMN_STEP_BYTES, 1)[0] = scale


def put_query(cache, target, x, scale):
    row_scale, inverse = _scales(_largest(x), LEVELS)
    numbers = query_at(target + HEADER_BYTES, _steps(x) * PER_STEP)
    total = np.int32(0)
    for d in range(x.size):
        level = _level(x[d], inverse)
        numbers[d] = np.int16(level)
        total = np.int32(total + level)
    for d in range(x.size, numbers.size):
        numbers[d] = np.int16(0)
    _put_header(target, row_scale * scale, total)


def put_weights(cache, target, weights, seen, value_scales):
    scales = float32_at(value_scales, OUT_TILE)
    for j in range(min(seen, OUT_TILE)):
        weights[j] *= scales[j]
    row_scale, inverse = _scales(_largest(weights), WEIGHT_LEVELS)
    total = np.int32(0)
    if IN_FOURS:
        high = uint8_at(target + HEADER_BYTES, OUT_TILE)
        low = uint8_at(target + HEADER_BYTES + PLANE_BYTES, OUT_TILE)
        for j in range(OUT_TILE):
            level = _level(weights[j], inverse)
            high[j], low[j] = np.uint8(level >> np.int32(HIGH_BITS)), np.uint8(level & LOW)
            total = np.int32(total + level)
    else:
        shorts = int16_at(target + HEADER_BYTES, OUT_TILE)
        for j in range(OUT_TILE):
            level = _level(weights[j], inverse)
            shorts[j] = np.int16(level)
            total = np.int32(total + level)
    _put_header(target, row_scale, total)


@kernel
def _steps(x):
    return (x.size + PER_STEP - 1) // PER_STEP


@kernel
def _put_header(target, scale, total):
    float32_at(target, 1)[0] = scale
    int32_at(target + 4, 1)[0] = np.int32(np.int32(-128) * total)


@kernel
def _largest(x):
    bits = uint32_at(address(x), x.size)
    largest = np.uint32(0)
    for i in range(x.size):
        largest = max(largest, np.uint32(bits[i] & SIZE))
    return np.uint32(largest).view(np.float32)


@kernel
def _scales(largest, levels):
    if largest < LEAST_ROW:
        return ZERO, ZERO
    if largest < INFINITE:
        return largest / levels, levels / largest
    return NAN, ZERO


@kernel
def _level(x, inverse):
    return np.int32(np.float32(fma(x, inverse, ROUNDING)).view(np.int32) - ROUNDING_BITS)


@kernel
def _byte(x, inverse):
    return np.uint32((np.uint32(_level(x, inverse)) & BYTE) ^ OFFSET)
