"""How attention reads and writes a KV cache of each dtype.

Over an int8 cache keys, values and queries have a scale each, largest size / 127. A block's softmax weights, times
their values' scales, share a scale, largest / WEIGHT_LEVELS. So a block is quantized alike in every step, and its
products are whole numbers. A byte of the cache is a number + OFFSET; after the D / 4 steps of a key come the float32
scales of key and value.
"""

import numpy as np

from ...numbers import LEAST_ROW, LEVELS, ROUNDING, SIZE_BITS
from ..jit import kernel, overload_by_dtype
from ..simd.targets import TARGET
from ..simd.tiles import (
    HAS_VPDPBUSD,
    HEADER_BYTES,
    HIGH_BITS,
    OUT_TILE,
    PLANE_BYTES,
    ROW_TILE,
    SCORE_STEP_BYTES,
    STEP_BYTES,
)
from ..simd.vector_ir import (
    LANES,
    ROUNDING_BITS,
    address,
    float32_at,
    fma,
    int16_at,
    int32_at,
    uint8_at,
    uint16_at,
    uint32_at,
)
from .activations import ONE, ZERO
from .operands import rounded_to_bfloat16, to_bfloat16

KEY_BLOCK = OUT_TILE  # a block of keys is a tile's panel
KEY_STEP_BYTES = KEY_BLOCK * STEP_BYTES  # from one step of a key to the next
SCORE_BYTES = KEY_BLOCK * 4  # of a query's float32 scores of a block
LEAST_QUERY = 4  # float32 values, besides D, that make room for any query
PER_STEP = 4  # values of int8
SCALE_STEPS = 2  # after a key's
WEIGHT_LEVELS = np.float32(2**14 - 1)
OFFSET = 128  # of a byte from its number
SIZE = np.uint32(SIZE_BITS)
BYTE = np.uint32(0xFF)
INFINITE = np.float32(np.inf)
NAN = np.float32(np.nan)
LOW = np.int32(2**HIGH_BITS - 1)
query_at = uint8_at if HAS_VPDPBUSD else int16_at


def padded_head(head_size: int) -> int:
    return -(-head_size // LANES) * LANES


def _steps_of_key_int8(cache):
    return cache.shape[3] - SCALE_STEPS


def _bytes_of_query_int8(cache):
    return HEADER_BYTES + (cache.shape[3] - SCALE_STEPS) * SCORE_STEP_BYTES


def _put_key_int8(cache, column, x):
    scale, inverse = _scales(_largest(x), LEVELS)
    whole, at = x.size // PER_STEP, column
    for i in range(whole):
        first = PER_STEP * i
        low = np.uint32(_byte(x[first], inverse) | (_byte(x[first + 1], inverse) << np.uint32(8)))
        high = np.uint32(_byte(x[first + 2], inverse) | (_byte(x[first + 3], inverse) << np.uint32(8)))
        uint32_at(at, 1)[0] = np.uint32(low | np.uint32(high << np.uint32(16)))
        at += KEY_STEP_BYTES
    if whole * PER_STEP < x.size:
        for d in range(whole * PER_STEP, x.size):
            uint8_at(at, PER_STEP)[d - whole * PER_STEP] = np.uint8(_byte(x[d], inverse))
        at += KEY_STEP_BYTES
    float32_at(at, 1)[0] = scale


def _put_value_int8(cache, start, position, x, column):
    scale, inverse = _scales(_largest(x), LEVELS)
    shift = np.uint32(8 * (position % PER_STEP))
    others = np.uint32(~np.uint32(BYTE << shift))
    words = uint32_at(start + position // PER_STEP * cache.strides[3], x.size)
    for d in range(x.size):
        words[d] = np.uint32(words[d] & others) | np.uint32(_byte(x[d], inverse) << shift)
    float32_at(column + (_steps(x) + 1) * KEY_STEP_BYTES, 1)[0] = scale


def _put_query_int8(cache, target, x, scale):
    row_scale, inverse = _scales(_largest(x), LEVELS)
    levels = query_at(target + HEADER_BYTES, _steps(x) * PER_STEP)
    total = np.int32(0)
    for d in range(x.size):
        level = _level(x[d], inverse)
        levels[d] = np.int16(level)
        total = np.int32(total + level)
    for d in range(x.size, levels.size):
        levels[d] = np.int16(0)
    _put_header(target, row_scale * scale, total)


def _put_weights_int8(cache, target, weights, seen, value_scales):
    scales = float32_at(value_scales, OUT_TILE)
    for j in range(min(seen, OUT_TILE)):
        weights[j] *= scales[j]
    row_scale, inverse = _scales(_largest(weights), WEIGHT_LEVELS)
    total = np.int32(0)
    if HAS_VPDPBUSD:
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
    int32_at(target + 4, 1)[0] = np.int32(np.int32(-OFFSET) * total)


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
    return np.uint32((np.uint32(_level(x, inverse)) & BYTE) ^ np.uint32(OFFSET))


def _put_key_float32(cache, at, x):
    column = float32_at(at, x.size * KEY_BLOCK)
    for d in range(x.size):
        column[d * KEY_BLOCK] = x[d]


def _put_key_bfloat16(cache, at, x):
    pairs = (x.size + 1) // 2
    column = uint32_at(at, pairs * KEY_BLOCK)
    for i in range(x.size // 2):
        column[i * KEY_BLOCK] = _pair(to_bfloat16(x[2 * i]), to_bfloat16(x[2 * i + 1]))
    if x.size % 2:
        column[(pairs - 1) * KEY_BLOCK] = np.uint32(to_bfloat16(x[x.size - 1]))


# put_key writes a key (D,) to its column of a block.
put_key = overload_by_dtype(
    {"float32": _put_key_float32, "uint16": _put_key_bfloat16, "uint8": _put_key_int8}
)


def _put_value_float32(cache, start, position, x, column):
    target = float32_at(start + position * cache.strides[3], x.size)
    for d in range(x.size):
        target[d] = x[d]


def _put_value_bfloat16(cache, start, position, x, column):
    # Position 2i clears 2i + 1: 0 * NaN would be NaN.
    target = uint32_at(start + position // 2 * cache.strides[3], x.size)
    if position % 2:
        for d in range(x.size):
            target[d] = _pair(target[d], to_bfloat16(x[d]))
    else:
        for d in range(x.size):
            target[d] = np.uint32(to_bfloat16(x[d]))


# put_value writes a value (D,) to a position of the block at `start`, and its scale to its key's column.
put_value = overload_by_dtype(
    {"float32": _put_value_float32, "uint16": _put_value_bfloat16, "uint8": _put_value_int8}
)


@kernel
def _pair(low, high):
    return np.uint32(np.uint32(low) & np.uint32(0xFFFF)) | np.uint32(np.uint32(high) << np.uint32(16))


def _put_steps_float32(cache, target, x, scale):
    values = float32_at(target, x.size)
    for i in range(x.size):
        values[i] = x[i] * scale


def _put_steps_bfloat16(cache, target, x, scale):
    values = uint16_at(target, x.size + x.size % 2)
    values[values.size - 1] = np.uint16(0)
    for i in range(x.size):
        values[i] = to_bfloat16(x[i] * scale)


def _put_steps_widened(cache, target, x, scale):
    values = float32_at(target, x.size + x.size % 2)
    values[values.size - 1] = ZERO
    for i in range(x.size):
        values[i] = rounded_to_bfloat16(x[i] * scale)


def _bytes_as_they_lie(cache):
    return cache.shape[3] * STEP_BYTES


def _bytes_of_widened(cache):
    return cache.shape[3] * 2 * STEP_BYTES


# put_query writes scale * x, of a query x (D,), as the left side of a tile.
_put_rounded, _rounded_bytes = (
    (_put_steps_bfloat16, _bytes_as_they_lie)
    if TARGET.multiplies_bfloat16
    else (_put_steps_widened, _bytes_of_widened)
)
put_query = overload_by_dtype(
    {"float32": _put_steps_float32, "uint16": _put_rounded, "uint8": _put_query_int8}
)
bytes_of_query = overload_by_dtype(
    {"float32": _bytes_as_they_lie, "uint16": _rounded_bytes, "uint8": _bytes_of_query_int8}
)


def _at_the_scores(cache, scores):
    return scores


def _behind_the_scores(cache, scores):
    return scores + ROW_TILE * SCORE_BYTES


# In float32, softmax weights replace the scores.
place_of_weights = overload_by_dtype({"float32": _at_the_scores}, otherwise=_behind_the_scores)


def _leave_weights(cache, target, weights, seen, value_scales):
    pass


def _put_weights(cache, target, weights, seen, value_scales):
    put_query(cache, target, weights, ONE)


# put_weights writes a block's softmax weights (KEY_BLOCK,), the first `seen` not 0.
put_weights = overload_by_dtype(
    {"float32": _leave_weights, "uint8": _put_weights_int8}, otherwise=_put_weights
)


def _all_steps(cache):
    return cache.shape[3]


steps_of_key = overload_by_dtype({"uint8": _steps_of_key_int8}, otherwise=_all_steps)
