"""The KV cache, and moving keys and values in and out of its slots between steps. The layout is attention.py's.

Positions past those that are put into a slot are nobody's afterwards.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygpt.kernels.cuda.layers.attention import KEY_BLOCK, padded_head
from tinygpt.kernels.cuda.packing import array_type, item_bytes, to_bfloat16
from tinygpt.kernels.cuda.runtime import device as devices
from tinygpt.kernels.cuda.runtime.jit import device_function, kernel

from numba import cuda, int32, int64  # isort: skip

MOVE_THREADS = 128
COPY, READ, WRITE = "copy", "read", "write"


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every position, preallocated and written in place."""

    device: Any
    k: Any
    v: Any
    num_layers: int
    num_slots: int
    num_heads: int
    padded_len: int
    padded_head: int
    head_size: int
    is_float32: bool


def new_kv_cache(config, num_slots: int, max_model_len: int, dtype: str = "float32") -> KVCache:
    """Zeros. dtype: "float32" or "bfloat16"."""
    device, shape = devices.the_device(), _shape(config, num_slots, max_model_len)
    k, v = (device.zeros(shape, array_type(dtype)) for _ in range(2))
    return KVCache(device, k, v, *shape, config.head_size, dtype == "float32")


def kv_cache_bytes(config, num_slots: int, max_model_len: int, dtype: str = "float32") -> int:
    """What `new_kv_cache` takes of the GPU's memory."""
    return 2 * item_bytes(dtype) * math.prod(_shape(config, num_slots, max_model_len))


def _shape(config, num_slots: int, length: int) -> tuple[int, int, int, int, int]:
    return config.n_layer, num_slots, config.n_head, -(-length // KEY_BLOCK) * KEY_BLOCK, padded_head(config.head_size)


def copy_positions(kv_cache: KVCache, source_slot: int, target_slot: int, start: int, stop: int) -> None:
    """Give positions start to stop of `target_slot` the keys and values of `source_slot`, bit for bit."""
    for array, is_paired in _parts(kv_cache):
        _move(kv_cache, COPY, is_paired, array, array, source_slot, target_slot, start, stop)


def read_positions(
    kv_cache: KVCache, slot: int, start: int, stop: int, head_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Copies of a slot's keys and values, each (L, H, stop - start, D), in the cache's type: float32 or uint16."""
    shape, found = (kv_cache.num_layers, kv_cache.num_heads, stop - start, kv_cache.padded_head), []
    for array, is_paired in _parts(kv_cache):
        buffer = kv_cache.device.zeros(shape, array.dtype)
        _move(kv_cache, READ, is_paired, array, buffer, slot, 0, start, stop)
        values = kv_cache.device.read(buffer).reshape(shape)
        found.append(np.ascontiguousarray(values[..., :head_size]))  # (L, H, T, D)
    return found[0], found[1]


def write_positions(kv_cache: KVCache, slot: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
    """Put keys and values (L, H, n, D) into positions start to start + n of a slot.

    They are of the cache's type, as `read_positions` gives them, or float32, which is rounded to it.
    """
    for (array, is_paired), values in zip(_parts(kv_cache), (k, v), strict=True):
        if values.dtype != array.dtype:
            values = to_bfloat16(values)
        padding = [(0, 0)] * 3 + [(0, kv_cache.padded_head - values.shape[3])]
        buffer = kv_cache.device.array(np.pad(values, padding))  # (L, H, n, Dp)
        _move(kv_cache, WRITE, is_paired, array, buffer, slot, 0, start, start + values.shape[2])
        kv_cache.device.synchronize()  # the buffer is given back


def _parts(kv_cache: KVCache) -> tuple[tuple, tuple]:
    """Keys and values, and whether each of them keeps two positions side by side."""
    return (kv_cache.k, False), (kv_cache.v, not kv_cache.is_float32)


def _move(
    kv_cache: KVCache, purpose: str, is_paired: bool, array, other, slot: int, target_slot: int, start: int, stop: int
) -> None:
    c = kv_cache
    if stop > start:
        shape = c.num_slots, c.num_heads, c.padded_len, c.padded_head
        places = slot, target_slot, start, stop - start
        grid = (stop - start, c.num_heads, c.num_layers)
        c.device.launch(_move_kernel(purpose, is_paired), grid, MOVE_THREADS, array, other, *shape, *places)


@functools.cache
def _move_kernel(purpose: str, is_paired: bool):
    """move(array, other, num_slots, num_heads, padded_len, padded_head, slot, target_slot, start, count).

    A block for a position, a head and a layer. COPY: from a slot of the cache `array` to target_slot of the same; READ:
    to `other` (L, H, count, Dp); WRITE: from it.
    """

    @device_function
    def element(num_slots, num_heads, padded_len, padded_head, slot, head, position, d):
        plane = ((int64(cuda.blockIdx.z) * num_slots + slot) * num_heads + head) * padded_len
        if is_paired:
            return (plane + position - position % 2) * padded_head + d * 2 + position % 2
        return (plane + position) * padded_head + d

    def move(array, other, num_slots, num_heads, padded_len, padded_head, slot, target_slot, start, count):
        i, head = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y)
        for d in range(int32(cuda.threadIdx.x), padded_head, int32(MOVE_THREADS)):
            at = element(num_slots, num_heads, padded_len, padded_head, slot, head, start + i, d)
            if purpose == COPY:
                to = element(num_slots, num_heads, padded_len, padded_head, target_slot, head, start + i, d)
                array[to] = array[at]
            else:
                index = ((int64(cuda.blockIdx.z) * num_heads + head) * count + i) * padded_head + d
                if purpose == READ:
                    other[index] = array[at]
                else:
                    array[at] = other[index]

    return kernel(move)
