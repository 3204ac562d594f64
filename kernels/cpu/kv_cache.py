"""The KV cache: its layout by dtype, which attention reads and writes, and copies in and out of its slots.

A step of a column is 4 bytes, P values: 1 float32, 2 bfloat16 (uint16), or 4 int8. Keys are transposed in a block,
(..., D / P, KEY_BLOCK, P); values are (..., KEY_BLOCK / P, D rounded up to LANES, P).
"""

import contextlib
import math
import mmap
from typing import NamedTuple

import numpy as np

from ..numbers import SCALE_BYTES, to_bfloat16, to_rows
from .layers.cache_dtypes import KEY_BLOCK, OFFSET, PER_STEP, SCALE_STEPS, padded_head

# The type of a cache's arrays, and the values in a step of 4 bytes.
KINDS = {"float32": (np.float32, 1), "bfloat16": (np.uint16, 2), "int8": (np.uint8, PER_STEP)}


class KVCache(NamedTuple):
    """Keys and values of every position, views of one array (S, T / KEY_BLOCK, L, H, ...)."""

    k: np.ndarray  # (L, S, H, T / KEY_BLOCK, D / P rounded up, KEY_BLOCK, P), or SCALE_STEPS more of int8
    v: np.ndarray  # (L, S, H, T / KEY_BLOCK, KEY_BLOCK / P, D rounded up to LANES, P)


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
    scales = np.split(k[..., -SCALE_STEPS * SCALE_BYTES :], SCALE_STEPS, axis=-1)
    parts = zip((k[..., :head_size], v), scales, strict=True)
    return tuple(np.concatenate([x ^ OFFSET, scale], axis=-1).view(np.int8) for x, scale in parts)


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
        new = slice(first, first + inside.stop - inside.start)
        kv_cache.k[:, slot, :, block, :, inside] = k[:, :, :, new]
        for part in range(per_step):  # every P-th position
            skipped = (part - inside.start) % per_step
            values = v[:, :, new][:, :, skipped::per_step]  # (L, H, n / P, D)
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
    k, v = (x if x.dtype == kind else to_bfloat16(x) for x in (k, v))
    return _in_whole_steps(k, per_step), v


def _in_whole_steps(k: np.ndarray, per_step: int) -> np.ndarray:
    return np.pad(k, [(0, 0)] * 3 + [(0, -k.shape[3] % per_step)])  # (L, H, n, D rounded up)


def _levels_and_scales(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = (x if x.dtype == np.int8 else to_rows(np.asarray(x, np.float32))).view(np.uint8)
    return rows[..., :-SCALE_BYTES] ^ OFFSET, rows[..., -SCALE_BYTES:]
