"""The KV cache, and moving keys and values in and out of its slots between steps."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every position, preallocated and written in place."""

    k: np.ndarray  # (L, S, H, T, D)
    v: np.ndarray  # (L, S, H, T, D)


def new_kv_cache(config, num_slots: int, max_model_len: int, dtype: str = "float32") -> KVCache:
    shape = (config.n_layer, num_slots, config.n_head, max_model_len, config.head_size)
    return KVCache(np.zeros(shape), np.zeros(shape))


def kv_cache_bytes(config, num_slots: int, max_model_len: int, dtype: str = "float32") -> int:
    """What `new_kv_cache` would take when it is full."""
    return 2 * 8 * config.n_layer * num_slots * max_model_len * config.n_embd


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
        array[:, slot, :, start : start + values.shape[2]] = values
