"""Moving keys and values in and out of the cache's rows, between steps."""

import numpy as np


def copy_positions(cache, source_slot: int, target_slot: int, start: int, stop: int) -> None:
    """Give positions start to stop of `target_slot` the keys and values of `source_slot`."""
    for array in (cache.k, cache.v):
        array[:, target_slot, :, start:stop] = array[:, source_slot, :, start:stop]


def read_positions(cache, slot: int, start: int, stop: int, head_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Copies of a slot's keys and values, each (L, H, stop - start, D)."""
    return cache.k[:, slot, :, start:stop].copy(), cache.v[:, slot, :, start:stop].copy()


def write_positions(cache, slot: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
    """Put keys and values (L, H, n, D) into positions start to start + n of a slot."""
    for array, values in ((cache.k, k), (cache.v, v)):
        array[:, slot, :, start : start + values.shape[2]] = values
