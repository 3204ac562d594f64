"""Moving keys and values in and out of the cache's rows, between steps."""

import numpy as np


def copy_positions(cache, source_row: int, target_row: int, start: int, stop: int) -> None:
    """Give positions start to stop of `target_row` the keys and values of `source_row`."""
    for array in (cache.k, cache.v):
        array[:, target_row, :, start:stop] = array[:, source_row, :, start:stop]


def read_positions(cache, row: int, start: int, stop: int, head_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Copies of a row's keys and values, each (L, H, stop - start, D)."""
    return cache.k[:, row, :, start:stop].copy(), cache.v[:, row, :, start:stop].copy()


def write_positions(cache, row: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
    """Put keys and values (L, H, n, D) into positions start to start + n of a row."""
    for array, values in ((cache.k, k), (cache.v, v)):
        array[:, row, :, start : start + values.shape[2]] = values
