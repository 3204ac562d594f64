"""The KV cache, in the layouts of attention.py, what fills it with int8, and copies in and out of its slots.

A row is a head's key or value at a position: D numbers, and in int8 the bytes of its scale (numbers.py).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda, float32, int8, int32, int64, uint32

from ..numbers import INFINITE_BITS, LEAST_ROW, LEVELS, ROUNDING, SCALE_BYTES, SIZE_BITS, to_rows
from . import device as devices
from .jit import (
    WARP,
    bits_to_float32,
    device_function,
    float32_to_bits,
    kernel,
    lane_and_warp,
    let_next_kernel_begin,
    wait_for_kernel_before,
    warp_greatest,
)
from .layers.attention_products import KEY_BLOCK, SCALES_BYTES, TILE, TILE_BYTES
from .params import DTYPES, NUMBERS, padded_columns

MOVE_THREADS = 128
PUT_THREADS = 3 * WARP
COPY = "copy"
READ = "read"
WRITE = "write"


@device_function
def _in_rows(position, d, size, head_size):
    return position * size + d


@device_function
def _in_pairs(position, d, size, head_size):
    return (position - position % 2) * size + d * 2 + position % 2


def _in_tiles(place: Callable) -> Callable:
    """place: (position, d), of a byte in its tile."""

    def find(position, d, size, head_size):
        position, d = uint32(position), uint32(d)  # division rounds down without a branch
        start = position // KEY_BLOCK * (SCALES_BYTES + KEY_BLOCK * size)
        inside = position % KEY_BLOCK
        if d >= head_size:
            scale = inside % 8 // 2 * TILE + inside // 8 * 2 + inside % 2
            return start + scale * SCALE_BYTES + d - head_size
        tile = inside // TILE * (size // 32) + d // 32
        return start + SCALES_BYTES + tile * TILE_BYTES + place(position, d)

    return device_function(find)


@device_function
def _of_key(position, d):
    lane = position % 8 * 4 + d % 32 // 8
    return lane * 16 + position % TILE // 8 * 8 + (d & 4 | d % 2 * 2 | d % 4 // 2)


@device_function
def _of_value(position, d):
    lane = d % 32 // 4 * 4 + position % 8 // 2
    return lane * 16 + d % 4 * 4 + position % 2 * 2 + position % TILE // 8


@dataclass(frozen=True)
class Layout:
    """How the cache keeps a dtype.

    encode: float32 (..., D) as rows
    key_place, value_place: (position, d, Dp, D), of a row's number or byte d in its head's part of k or v
    scale_bytes: of a row
    """

    array_type: Any
    encode: Callable
    key_place: Callable
    value_place: Callable
    scale_bytes: int = 0


LAYOUTS = {
    name: Layout(numbers.array_type, numbers.encode, _in_rows, _in_pairs if numbers.has_mma else _in_rows)
    for name, numbers in NUMBERS.items()
}
LAYOUTS["int8"] = Layout(np.int8, to_rows, _in_tiles(_of_key), _in_tiles(_of_value), SCALE_BYTES)


@dataclass(frozen=True)
class KVCache:
    device: Any
    layout: Layout
    k: Any
    v: Any
    num_layers: int
    num_slots: int
    num_heads: int
    padded_len: int
    padded_head: int
    head_size: int

    @property
    def is_int8(self) -> bool:
        return self.layout.scale_bytes > 0


def new_kv_cache(config, num_slots: int, max_model_len: int, dtype: str = "float32") -> KVCache:
    device = devices.the_device()
    shape = _shape(config, num_slots, max_model_len)
    layout = LAYOUTS[dtype]
    *sizes, padded = shape
    k, v = (device.zeros((*sizes, padded + layout.scale_bytes), layout.array_type) for _ in range(2))
    return KVCache(device, layout, k, v, *shape, config.head_size)


def kv_cache_bytes(config, num_slots: int, max_model_len: int, dtype: str = "float32") -> int:
    layout = LAYOUTS[dtype]
    *sizes, padded = _shape(config, num_slots, max_model_len)
    row_bytes = padded * np.dtype(layout.array_type).itemsize + layout.scale_bytes
    return 2 * math.prod(sizes) * row_bytes


def padded_head(head_size: int) -> int:
    """Return Dp, the head size in whole blocks of 32."""
    return -(-head_size // 32) * 32


def copy_positions(kv_cache: KVCache, source_slot: int, target_slot: int, start: int, stop: int) -> None:
    for array, place in _arrays(kv_cache):
        _move(kv_cache, COPY, place, array, array, source_slot, target_slot, start, stop)


def read_positions(
    kv_cache: KVCache, slot: int, start: int, stop: int, head_size: int
) -> tuple[np.ndarray, np.ndarray]:
    row_size = head_size + kv_cache.layout.scale_bytes
    shape = (kv_cache.num_layers, kv_cache.num_heads, stop - start, row_size)
    found = []
    for array, place in _arrays(kv_cache):
        buffer = kv_cache.device.zeros(shape, array.dtype)
        _move(kv_cache, READ, place, array, buffer, slot, 0, start, stop)
        found.append(kv_cache.device.read(buffer).reshape(shape))
    return found[0], found[1]


def write_positions(kv_cache: KVCache, slot: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
    for (array, place), values in zip(_arrays(kv_cache), (k, v), strict=True):
        if values.dtype != array.dtype:
            values = kv_cache.layout.encode(values)
        buffer = kv_cache.device.array(values)  # (L, H, n, D), and a scale
        _move(kv_cache, WRITE, place, array, buffer, slot, 0, start, start + values.shape[2])
        kv_cache.device.synchronize()  # the buffer is freed


def _shape(config, num_slots: int, length: int) -> tuple[int, int, int, int, int]:
    return (
        config.n_layer,
        num_slots,
        config.n_head,
        -(-length // KEY_BLOCK) * KEY_BLOCK,
        padded_head(config.head_size),
    )


def _arrays(kv_cache: KVCache) -> tuple[tuple, tuple]:
    """Return keys and values, with the place of a number."""
    layout = kv_cache.layout
    return (kv_cache.k, layout.key_place), (kv_cache.v, layout.value_place)


def _move(
    kv_cache: KVCache,
    direction: str,
    place: Callable,
    array,
    other,
    slot: int,
    target_slot: int,
    start: int,
    stop: int,
) -> None:
    c = kv_cache
    if stop > start:
        shape = c.num_slots, c.num_heads, c.padded_len, c.padded_head, c.head_size, c.layout.scale_bytes
        places = slot, target_slot, start, stop - start
        grid = (stop - start, c.num_heads, c.num_layers)
        c.device.launch(_move_kernel(direction, place), grid, MOVE_THREADS, array, other, *shape, *places)


@functools.cache
def _move_kernel(direction: str, place: Callable):
    """COPY within `array`, READ to `other` (L, H, count, row), or WRITE from it. Grid (count, H, L)."""

    def move(
        array, other, num_slots, num_heads, padded_len, padded_head, head_size, scale_bytes,
        slot, target_slot, start, count,
    ):  # fmt: skip
        i = cuda.blockIdx.x
        head = cuda.blockIdx.y
        layer = int64(cuda.blockIdx.z)
        position = start + i
        plane = padded_len * (padded_head + scale_bytes)
        from_slot = ((layer * num_slots + slot) * num_heads + head) * plane
        to_target = (target_slot - slot) * num_heads * plane
        row_size = head_size + scale_bytes
        for d in range(cuda.threadIdx.x, row_size, MOVE_THREADS):
            at = from_slot + place(position, d, padded_head, head_size)
            if direction == COPY:
                array[at + to_target] = array[at]
            else:
                index = ((layer * num_heads + head) * count + i) * row_size + d
                if direction == READ:
                    other[index] = array[at]
                else:
                    array[at] = other[index]

    return kernel(move)


def put_rows(heads: Any, dtype: str, layer: int, workspace: Any, tokens: int) -> None:
    """Put the rows of `qkv`, of a family of numbers, into q and an int8 cache."""
    w = workspace
    width = padded_columns(3 * heads.num_heads * heads.head_size)
    arguments = heads, w.qkv, width, layer, w.inputs.sizes
    w.device.launch(put_kernel(dtype), (tokens, heads.num_heads), PUT_THREADS, *arguments)


@functools.cache
def put_kernel(dtype: str):
    """Quantize keys and values as numbers.py does. Grid (N, H), a warp for each of query, key and value."""
    load = DTYPES[dtype].load
    key_place = LAYOUTS["int8"].key_place
    value_place = LAYOUTS["int8"].value_place

    def put(heads, rows, width, layer, sizes):
        let_next_kernel_begin()
        (lane, part) = lane_and_warp()
        n = cuda.blockIdx.x
        head = cuda.blockIdx.y
        head_size = heads.head_size
        padded_head = heads.padded_head
        if n >= sizes[0]:
            return
        wait_for_kernel_before()
        row = n * width + (part * heads.num_heads + head) * head_size
        if part == 0:
            for d in range(lane, head_size, WARP):
                heads.q[(n * heads.num_heads + head) * padded_head + d] = rows[row + d]
            return
        greatest = int32(0)
        for d in range(lane, head_size, WARP):
            size = int32(float32_to_bits(load(rows, row + d)) & SIZE_BITS)
            greatest = max(greatest, size)  # of bits: a NaN is the greatest
        greatest = warp_greatest(greatest)
        largest = bits_to_float32(greatest)
        scale, inverse = float32(0), float32(0)
        if greatest >= INFINITE_BITS:
            scale = float32(math.nan)
        elif largest >= LEAST_ROW:
            scale, inverse = largest / LEVELS, LEVELS / largest
        plane = heads.padded_len * (padded_head + SCALE_BYTES)
        start = ((layer * heads.num_slots + heads.token_slots[n]) * heads.num_heads + head) * plane
        position = heads.positions[n]
        for d in range(lane, head_size + SCALE_BYTES, WARP):
            byte = float32_to_bits(scale) >> 8 * max(d - head_size, 0)
            if d < head_size:
                byte = float32_to_bits(cuda.fma(load(rows, row + d), inverse, ROUNDING))
            if part == 1:
                heads.k_cache[start + key_place(position, d, padded_head, head_size)] = int8(byte)
            else:
                heads.v_cache[start + value_place(position, d, padded_head, head_size)] = int8(byte)

    return kernel(put)
