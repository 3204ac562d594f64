"""Moving keys and values in and out of the cache's rows, between steps. The layout is attention.py's."""

import numpy as np

from tinygpt.kernels.cpu.attention import KEY_BLOCK


def copy_positions(cache, source_row: int, target_row: int, start: int, stop: int) -> None:
    """Give positions start to stop of `target_row` the keys and values of `source_row`, bit for bit."""
    cache.v[:, target_row, :, start:stop] = cache.v[:, source_row, :, start:stop]
    for block, inside in _key_blocks(start, stop):
        cache.k[:, target_row, :, block, :, inside] = cache.k[:, source_row, :, block, :, inside]


def read_positions(cache, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Copies of a row's keys and values, each (L, H, stop - start, D), in the cache's type: float32 or uint16."""
    layers, _, heads, blocks, size, _ = cache.k.shape
    k = cache.k[:, row].swapaxes(-1, -2).reshape(layers, heads, blocks * KEY_BLOCK, size)  # (L, H, T, D)
    return k[:, :, start:stop].copy(), cache.v[:, row, :, start:stop, :size].copy()


def write_positions(cache, row: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
    """Put keys and values (L, H, n, D) into positions start to start + n of a row.

    They are of the cache's type, as `read_positions` gives them, or float32, which is rounded to it.
    """
    k, v, size, stop = _encoded(cache, k), _encoded(cache, v), k.shape[3], start + k.shape[2]
    cache.v[:, row, :, start:stop, :size] = v
    for block, inside in _key_blocks(start, stop):
        first = block * KEY_BLOCK + inside.start - start
        part = k[:, :, first : first + inside.stop - inside.start]  # (L, H, n, D)
        cache.k[:, row, :, block, :, inside] = part.swapaxes(-1, -2)


def _key_blocks(start: int, stop: int):
    """The key blocks that positions start to stop lie in, and which part of each they are."""
    for block in range(start // KEY_BLOCK, -(-stop // KEY_BLOCK)):
        first = block * KEY_BLOCK
        yield block, slice(max(start - first, 0), min(stop - first, KEY_BLOCK))


def _encoded(cache, values: np.ndarray) -> np.ndarray:
    if values.dtype == cache.k.dtype:
        return values
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)  # to bfloat16, ties to even
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
