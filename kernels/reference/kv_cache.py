"""The KV cache, and moving keys and values in and out of its slots between steps.

An int8 cache keeps of each key and value, x (D,) of a head and position, whole numbers from -127 to 127 and a scale.
Here it holds their products.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every position, preallocated and written in place."""

    k: np.ndarray  # (L, S, H, T, D)
    v: np.ndarray  # (L, S, H, T, D)
    dtype: str


def new_kv_cache(config, num_slots: int, max_model_len: int, dtype: str = "float32") -> KVCache:
    shape = (config.n_layer, num_slots, config.n_head, max_model_len, config.head_size)
    return KVCache(np.zeros(shape), np.zeros(shape), dtype)


def kv_cache_bytes(config, num_slots: int, max_model_len: int, dtype: str = "float32") -> int:
    """What `new_kv_cache` would take when it is full."""
    return 2 * 8 * config.n_layer * num_slots * max_model_len * config.n_embd


def write_kv(kv_cache: KVCache, layer: int, slot: int, positions: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    """Put the new tokens' keys and values (N, H, D) in their place."""
    for array, new in ((kv_cache.k, k), (kv_cache.v, v)):
        array[layer, slot, :, positions] = _kept(kv_cache, new)


def copy_positions(kv_cache: KVCache, source_slot: int, target_slot: int, start: int, stop: int) -> None:
    """Give positions start to stop of `target_slot` the keys and values of `source_slot`."""
    for array in (kv_cache.k, kv_cache.v):
        array[:, target_slot, :, start:stop] = array[:, source_slot, :, start:stop]


def read_positions(
    kv_cache: KVCache, slot: int, start: int, stop: int, head_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Copies of a slot's keys and values, each (L, H, stop - start, D)."""
    return kv_cache.k[:, slot, :, start:stop].copy(), kv_cache.v[:, slot, :, start:stop].copy()


def write_positions(kv_cache: KVCache, slot: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
    """Put keys and values (L, H, n, D) into positions start to start + n of a slot."""
    for array, values in ((kv_cache.k, k), (kv_cache.v, v)):
        array[:, slot, :, start : start + values.shape[2]] = _kept(kv_cache, values)


def _kept(kv_cache: KVCache, x: np.ndarray) -> np.ndarray:
    """What the cache keeps of keys or values (..., D)."""
    if kv_cache.dtype != "int8":
        return x
    numbers, scales = to_int8(x)
    return numbers * scales


def to_int8(x: np.ndarray, levels: int = 127) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers of which the largest size is `levels`, and their scales (..., 1): their product is near x (..., D).

    The numbers are float64, and scales have float32's precision, in which they are kept.
    """
    scales = (np.abs(x).max(-1, keepdims=True) / levels).astype(np.float32).astype(np.float64)  # (..., 1)
    return np.rint(x / np.where(scales == 0, 1, scales)), scales
