"""The KV cache: its layout by dtype, which attention.py reads and writes, and copies in and out of its slots.

A step of a column is 4 bytes, P values: 1 float32, 2 bfloat16 (uint16), or 4 int8. Keys are transposed in a block,
(..., D / P, KEY_BLOCK, P); values are (..., KEY_BLOCK / P, D rounded up to LANES, P).

Over an int8 cache keys, values and queries have a scale each, largest size / 127. A block's softmax weights, times
their values' scales, share a scale, largest / WEIGHT_LEVELS. So a block is quantized alike in every step, and its
products are whole numbers. A byte of the cache is a number + 128; after the D / 4 steps of a key come the float32
scales of key and value.
"""

import contextlib
import math
import mmap
from typing import NamedTuple

import numpy as np
from numba import types

from .. import numbers
from ..numbers import LEAST_ROW, LEVELS
from .jit import kernel, overload_by_dtype
from .layers.activations import ONE, ZERO
from .layers.operands import rounded_to_bfloat16, to_bfloat16
from .simd.targets import TARGET
from .simd.tiles import (
    HAS_VPDPBUSD,
    HEADER_BYTES,
    HIGH_BITS,
    OUT_TILE,
    PLANE_BYTES,
    ROW_TILE,
    SCORE_STEP_BYTES,
    STEP_BYTES,
)
from .simd.vector_ir import (
    LANES,
    ROUNDING,
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

KEY_BLOCK = OUT_TILE  # a block of keys is a tile's panel
KEY_STEP_BYTES = KEY_BLOCK * STEP_BYTES  # from one step of a key to the next
SCORE_BYTES = KEY_BLOCK * 4  # of a query's float32 scores of a block
# The type of a cache's arrays, and the values in a step of 4 bytes.
KINDS = {"float32": (np.float32, 1), "bfloat16": (np.uint16, 2), "int8": (np.uint8, 4)}
PER_STEP = 4  # values of int8
SCALE_STEPS = 2  # after a key's
WEIGHT_LEVELS = np.float32(2**14 - 1)
SIZE = np.uint32(0x7FFFFFFF)
BYTE = np.uint32(0xFF)
OFFSET = np.uint32(0x80)
OFFSET_BYTE = np.uint8(OFFSET)
INFINITE = np.float32(np.inf)
NAN = np.float32(np.nan)
LOW = np.int32(2**HIGH_BITS - 1)
query_at = uint8_at if HAS_VPDPBUSD else int16_at
LEAST_QUERY = 4  # float32 values, besides D, that make room for any query


class KVCache(NamedTuple):
    """Keys and values of every position, views of one array (S, T / KEY_BLOCK, L, H, ...)."""

    k: np.ndarray  # (L, S, H, T / KEY_BLOCK, D / P rounded up, KEY_BLOCK, P), or SCALE_STEPS more of int8
    v: np.ndarray  # (L, S, H, T / KEY_BLOCK, KEY_BLOCK / P, D rounded up to LANES, P)


def padded_head(head_size: int) -> int:
    return -(-head_size // LANES) * LANES


def new_kv_cache(config, num_slots: int, max_model_len: int, dtype: str = "float32") -> KVCache:
    """Reserve a cache of a dtype in KINDS: pages take memory once they are written."""
    blocks = -(-max_model_len // KEY_BLOCK)
    shapes = _block_shapes(config, dtype)
    k_size, v_size = map(math.prod, shapes)
    whole = (num_slots, blocks, config.n_layer, config.n_head, k_size + v_size)
    array = _untouched(whole, KINDS[dtype][0])  # (S, T / KEY_BLOCK, L, H, ...)
    parts = zip(np.split(array, [k_size], axis=-1), shapes, strict=True)
    return KVCache(
        *(part.reshape(*whole[:-1], *shape).transpose(2, 0, 3, 1, 4, 5, 6) for part, shape in parts)
    )


def kv_cache_bytes(config, num_slots: int, max_model_len: int, dtype: str = "float32") -> int:
    of_block = sum(map(math.prod, _block_shapes(config, dtype))) * np.dtype(KINDS[dtype][0]).itemsize
    return num_slots * -(-max_model_len // KEY_BLOCK) * config.n_layer * config.n_head * of_block


def _untouched(shape: tuple[int, ...], dtype) -> np.ndarray:
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


def _block_shapes(config, dtype: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    size = config.head_size
    (_, per_step) = KINDS[dtype]
    steps = -(-size // per_step) + (SCALE_STEPS if dtype == "int8" else 0)
    return (steps, KEY_BLOCK, per_step), (KEY_BLOCK // per_step, padded_head(size), per_step)


def copy_positions(kv_cache, source_slot: int, target_slot: int, start: int, stop: int) -> None:
    for block, inside in _blocks(start, stop):
        kv_cache.k[:, target_slot, :, block, :, inside] = kv_cache.k[:, source_slot, :, block, :, inside]
        for steps, parts in _value_steps(kv_cache, inside):
            source = kv_cache.v[:, source_slot, :, block, steps, :, parts]
            kv_cache.v[:, target_slot, :, block, steps, :, parts] = source
    _clear_rest(kv_cache, target_slot, stop)


def read_positions(
    kv_cache, slot: int, start: int, stop: int, head_size: int
) -> tuple[np.ndarray, np.ndarray]:
    places = [*_blocks(start, stop)] or [(0, slice(0, 0))]  # no positions
    parts = zip(*(_read_block(kv_cache, slot, *place) for place in places), strict=True)
    k, v = (np.concatenate(part, axis=2) for part in parts)  # (L, H, n, D), wider if padded
    v = v[..., :head_size]
    if k.dtype != np.uint8:
        return k[..., :head_size].copy(), v.copy()
    scales = np.split(k[..., -SCALE_STEPS * numbers.SCALE_BYTES :], SCALE_STEPS, axis=-1)
    parts = zip((k[..., :head_size], v), scales, strict=True)
    return tuple(np.concatenate([x ^ OFFSET_BYTE, scale], axis=-1).view(np.int8) for x, scale in parts)


def _read_block(kv_cache, slot: int, block: int, inside: slice) -> tuple[np.ndarray, np.ndarray]:
    k = kv_cache.k[:, slot, :, block, :, inside].swapaxes(2, 3)  # (L, H, n, D / P, P)
    per_step = kv_cache.v.shape[-1]
    first = inside.start // per_step
    last = -(-inside.stop // per_step)
    v = kv_cache.v[:, slot, :, block, first:last].swapaxes(3, 4)  # (L, H, n / P, P, D)
    v = v.reshape(*v.shape[:2], v.shape[2] * per_step, v.shape[4])[:, :, inside.start - first * per_step :]
    return k.reshape(*k.shape[:3], k.shape[3] * per_step), v[:, :, : k.shape[2]]


def write_positions(kv_cache, slot: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
    k, v = _encoded(kv_cache, k, v)
    size = v.shape[3]
    stop = start + k.shape[2]
    per_step = kv_cache.k.shape[-1]
    k = k.reshape(*k.shape[:3], -1, per_step).swapaxes(2, 3)  # (L, H, D / P, n, P)
    for block, inside in _blocks(start, stop):
        first = block * KEY_BLOCK + inside.start - start
        given = slice(first, first + inside.stop - inside.start)
        kv_cache.k[:, slot, :, block, :, inside] = k[:, :, :, given]
        for part in range(per_step):  # every P-th position
            skipped = (part - inside.start) % per_step
            values = v[:, :, given][:, :, skipped::per_step]  # (L, H, n / P, D)
            step = (inside.start + skipped) // per_step
            kv_cache.v[:, slot, :, block, step : step + values.shape[2], :size, part] = values
    _clear_rest(kv_cache, slot, stop)


def _blocks(start: int, stop: int):
    for block in range(start // KEY_BLOCK, -(-stop // KEY_BLOCK)):
        first = block * KEY_BLOCK
        yield block, slice(max(start - first, 0), min(stop - first, KEY_BLOCK))


def _value_steps(kv_cache, inside: slice):
    per_step = kv_cache.v.shape[-1]
    start = inside.start
    stop = inside.stop
    if start % per_step and start < stop:
        yield slice(start // per_step, start // per_step + 1), slice(start % per_step, None)
        start += per_step - start % per_step
    whole = stop // per_step
    if start < stop:
        yield slice(start // per_step, whole), slice(None)
        yield slice(whole, -(-stop // per_step)), slice(stop % per_step)


def _clear_rest(kv_cache, slot: int, stop: int) -> None:
    """Clear the value that shares a step of bfloat16 with the last position: its weight is 0, and 0 * NaN is NaN."""
    if kv_cache.v.dtype == np.uint16 and stop % 2:
        kv_cache.v[:, slot, :, stop // KEY_BLOCK, stop % KEY_BLOCK // 2, :, 1] = 0


def _encoded(kv_cache, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    kind = kv_cache.k.dtype
    per_step = kv_cache.k.shape[-1]
    if kind == np.uint8:
        (k, k_scales), (v, v_scales) = map(_levels_and_scales, (k, v))
        return np.concatenate([_in_whole_steps(k, per_step), k_scales, v_scales], axis=-1), v
    k, v = (x if x.dtype == kind else numbers.to_bfloat16(x) for x in (k, v))
    return _in_whole_steps(k, per_step), v


def _in_whole_steps(k: np.ndarray, per_step: int) -> np.ndarray:
    return np.pad(k, [(0, 0)] * 3 + [(0, -k.shape[3] % per_step)])  # (L, H, n, D rounded up)


def _levels_and_scales(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = (x if x.dtype == np.int8 else numbers.to_rows(np.asarray(x, np.float32))).view(np.uint8)
    return rows[..., : -numbers.SCALE_BYTES] ^ OFFSET_BYTE, rows[..., -numbers.SCALE_BYTES :]


# What kernels do by the dtype of a cache.


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
    numbers = query_at(target + HEADER_BYTES, _steps(x) * PER_STEP)
    total = np.int32(0)
    for d in range(x.size):
        level = _level(x[d], inverse)
        numbers[d] = np.int16(level)
        total = np.int32(total + level)
    for d in range(x.size, numbers.size):
        numbers[d] = np.int16(0)
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
    {types.float32: _put_key_float32, types.uint16: _put_key_bfloat16, types.uint8: _put_key_int8}
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
    {types.float32: _put_value_float32, types.uint16: _put_value_bfloat16, types.uint8: _put_value_int8}
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
    {types.float32: _put_steps_float32, types.uint16: _put_rounded, types.uint8: _put_query_int8}
)
bytes_of_query = overload_by_dtype(
    {types.float32: _bytes_as_they_lie, types.uint16: _rounded_bytes, types.uint8: _bytes_of_query_int8}
)


def _at_the_scores(cache, scores):
    return scores


def _behind_the_scores(cache, scores):
    return scores + ROW_TILE * SCORE_BYTES


# In float32, softmax weights replace the scores.
place_of_weights = overload_by_dtype({types.float32: _at_the_scores}, otherwise=_behind_the_scores)


def _leave_weights(cache, target, weights, seen, value_scales):
    pass


def _put_weights(cache, target, weights, seen, value_scales):
    put_query(cache, target, weights, ONE)


# put_weights writes a block's softmax weights (KEY_BLOCK,), the first `seen` not 0.
put_weights = overload_by_dtype(
    {types.float32: _leave_weights, types.uint8: _put_weights_int8}, otherwise=_put_weights
)


def _all_steps(cache):
    return cache.shape[3]


steps_of_key = overload_by_dtype({types.uint8: _steps_of_key_int8}, otherwise=_all_steps)
