"""The KV cache, in the layout of attention.py, and copies in and out of its slots."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda, int32, int64

from . import device as devices
from .jit import kernel
from .layers.attention_products import KEY_BLOCK
from .params import NUMBERS, Numbers

MOVE_THREADS = 128
COPY = "copy"
READ = "read"
WRITE = "write"


@dataclass(frozen=True)
class KVCache:
    device: Any
    numbers: Numbers
    k: Any
    v: Any
    num_layers: int
    num_slots: int
    num_heads: int
    padded_len: int
    padded_head: int
    head_size: int


def new_kv_cache(config, num_slots: int, max_model_len: int, dtype: str = "float32") -> KVCache:
    device = devices.the_device()
    shape = _shape(config, num_slots, max_model_len)
    numbers = NUMBERS[dtype]
    k, v = (device.zeros(shape, numbers.array_type) for _ in range(2))
    return KVCache(device, numbers, k, v, *shape, config.head_size)


def kv_cache_bytes(config, num_slots: int, max_model_len: int, dtype: str = "float32") -> int:
    return 2 * NUMBERS[dtype].item_bytes * math.prod(_shape(config, num_slots, max_model_len))


def padded_head(head_size: int) -> int:
    """Return Dp, the head size in whole blocks of 32."""
    return -(-head_size // 32) * 32


def copy_positions(kv_cache: KVCache, source_slot: int, target_slot: int, start: int, stop: int) -> None:
    for array, is_paired in _arrays(kv_cache):
        _move(kv_cache, COPY, is_paired, array, array, source_slot, target_slot, start, stop)


def read_positions(
    kv_cache: KVCache, slot: int, start: int, stop: int, head_size: int
) -> tuple[np.ndarray, np.ndarray]:
    shape = (kv_cache.num_layers, kv_cache.num_heads, stop - start, kv_cache.padded_head)
    found = []
    for array, is_paired in _arrays(kv_cache):
        buffer = kv_cache.device.zeros(shape, array.dtype)
        _move(kv_cache, READ, is_paired, array, buffer, slot, 0, start, stop)
        values = kv_cache.device.read(buffer).reshape(shape)
        found.append(np.ascontiguousarray(values[..., :head_size]))  # (L, H, T, D)
    return found[0], found[1]


def write_positions(kv_cache: KVCache, slot: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
    for (array, is_paired), values in zip(_arrays(kv_cache), (k, v), strict=True):
        if values.dtype != array.dtype:
            values = kv_cache.numbers.encode(values)
        padding = [(0, 0)] * 3 + [(0, kv_cache.padded_head - values.shape[3])]
        buffer = kv_cache.device.array(np.pad(values, padding))  # (L, H, n, Dp)
        _move(kv_cache, WRITE, is_paired, array, buffer, slot, 0, start, start + values.shape[2])
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
    """Return keys and values, with whether two positions are interleaved."""
    return (kv_cache.k, False), (kv_cache.v, kv_cache.numbers.has_mma)


def _move(
    kv_cache: KVCache,
    direction: str,
    is_paired: bool,
    array,
    other,
    slot: int,
    target_slot: int,
    start: int,
    stop: int,
) -> None:
    c = kv_cache
    if stop > start:
        shape = c.num_slots, c.num_heads, c.padded_len, c.padded_head
        places = slot, target_slot, start, stop - start
        grid = (stop - start, c.num_heads, c.num_layers)
        c.device.launch(_move_kernel(direction, is_paired), grid, MOVE_THREADS, array, other, *shape, *places)


@functools.cache
def _move_kernel(direction: str, is_paired: bool):
    """COPY within `array`, READ to `other` (L, H, count, Dp), or WRITE from it. Grid (count, H, L)."""

    def move(array, other, num_slots, num_heads, padded_len, padded_head, slot, target_slot, start, count):
        i = int32(cuda.blockIdx.x)
        head = int32(cuda.blockIdx.y)
        layer = int64(cuda.blockIdx.z)
        position = start + i
        plane = ((layer * num_slots + slot) * num_heads + head) * padded_len
        to_target = (target_slot - slot) * int64(num_heads) * padded_len * padded_head
        for d in range(int32(cuda.threadIdx.x), padded_head, int32(MOVE_THREADS)):
            at = (plane + position) * padded_head + d
            if is_paired:
                at = (plane + position - position % 2) * padded_head + d * 2 + position % 2
            if direction == COPY:
                array[at + to_target] = array[at]
            else:
                index = ((layer * num_heads + head) * count + i) * padded_head + d
                if direction == READ:
                    other[index] = array[at]
                else:
                    array[at] = other[index]

    return kernel(move)
