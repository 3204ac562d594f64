"""The KV cache, and moving keys and values in and out of its slots between steps. The layout is attention.py's.

Positions past those that are put into a slot are nobody's afterwards.
"""

import contextlib
import math
import mmap
from typing import NamedTuple

import numpy as np

from tinygpt.kernels.cpu.layers.attention import KEY_BLOCK, padded_head


class KVCache(NamedTuple):
    """Keys and values of every position, preallocated and written in place; T is rounded up to KEY_BLOCK."""

    # 4 bytes of a cache hold P values: 1 float32, or 2 bfloat16 (as uint16), which a tile multiplies in one step.
    k: np.ndarray  # (L, S, H, T / KEY_BLOCK, D / P rounded up, KEY_BLOCK, P)
    v: np.ndarray  # (L, S, H, T / P, D rounded up to LANES, P)


def new_kv_cache(config, num_slots: int, max_model_len: int, dtype: str = "float32") -> KVCache:
    """Zeros: memory that no sequence has reached costs nothing yet. dtype: "float32" or "bfloat16"."""
    kind = np.float32 if dtype == "float32" else np.uint16
    return KVCache(*(_small_pages(shape, kind) for shape in _shapes(config, num_slots, max_model_len, dtype)))


def kv_cache_bytes(config, num_slots: int, max_model_len: int, dtype: str = "float32") -> int:
    """What `new_kv_cache` would take when it is full."""
    shapes = _shapes(config, num_slots, max_model_len, dtype)
    return (4 if dtype == "float32" else 2) * sum(math.prod(shape) for shape in shapes)


def _shapes(config, num_slots: int, length: int, dtype: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    per_step = 1 if dtype == "float32" else 2
    blocks, size = -(-length // KEY_BLOCK), config.head_size
    k = (blocks, -(-size // per_step), KEY_BLOCK, per_step)
    v = (blocks * KEY_BLOCK // per_step, padded_head(size), per_step)
    return (config.n_layer, num_slots, config.n_head, *k), (config.n_layer, num_slots, config.n_head, *v)


def _small_pages(shape: tuple[int, ...], dtype) -> np.ndarray:
    """Zeros that arrive in pages of 4 KB as they are touched.

    For its own large arrays NumPy asks Linux for pages of 2 MB: a hardly begun cache then takes several of them for
    each layer, 80 MB for one sequence of GPT-2 124M, and clearing them delays the first token.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    try:
        pages = mmap.mmap(-1, size, **private)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size} bytes cannot be reserved") from error
    with contextlib.suppress(AttributeError, OSError):  # a system, or a kernel, that has no huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(shape)


def copy_positions(kv_cache, source_slot: int, target_slot: int, start: int, stop: int) -> None:
    """Give positions start to stop of `target_slot` the keys and values of `source_slot`, bit for bit."""
    for block, inside in _key_blocks(start, stop):
        kv_cache.k[:, target_slot, :, block, :, inside] = kv_cache.k[:, source_slot, :, block, :, inside]
    for steps, parts in _value_steps(kv_cache, start, stop):
        kv_cache.v[:, target_slot, :, steps, :, parts] = kv_cache.v[:, source_slot, :, steps, :, parts]
    _clear_rest(kv_cache, target_slot, stop)


def read_positions(kv_cache, slot: int, start: int, stop: int, head_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Copies of a slot's keys and values, each (L, H, stop - start, D), in the cache's type: float32 or uint16."""
    layers, _, heads, blocks, _, _, _ = kv_cache.k.shape
    k = kv_cache.k[:, slot].transpose(0, 1, 2, 4, 3, 5).reshape(layers, heads, blocks * KEY_BLOCK, -1)  # (L, H, T, D)
    v = kv_cache.v[:, slot].swapaxes(-1, -2).reshape(layers, heads, blocks * KEY_BLOCK, -1)  # (L, H, T, padded D)
    return k[:, :, start:stop, :head_size].copy(), v[:, :, start:stop, :head_size].copy()


def write_positions(kv_cache, slot: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
    """Put keys and values (L, H, n, D) into positions start to start + n of a slot.

    They are of the cache's type, as `read_positions` gives them, or float32, which is rounded to it.
    """
    k, v, size, stop = _encoded(kv_cache, k), _encoded(kv_cache, v), k.shape[3], start + k.shape[2]
    per_step = kv_cache.k.shape[-1]
    k = np.pad(k, [(0, 0)] * 3 + [(0, -size % per_step)])  # (L, H, n, D rounded up)
    k = k.reshape(*k.shape[:3], -1, per_step).swapaxes(2, 3)  # (L, H, D / P, n, P)
    for block, inside in _key_blocks(start, stop):
        first = block * KEY_BLOCK + inside.start - start
        kv_cache.k[:, slot, :, block, :, inside] = k[:, :, :, first : first + inside.stop - inside.start]
    for part in range(per_step):  # every P-th position
        first = start + (part - start) % per_step
        values = v[:, :, first - start :: per_step]  # (L, H, n / P, D)
        steps = slice(first // per_step, first // per_step + values.shape[2])
        kv_cache.v[:, slot, :, steps, :size, part] = values
    _clear_rest(kv_cache, slot, stop)


def _key_blocks(start: int, stop: int):
    """The key blocks that positions start to stop lie in, and which part of each they are."""
    for block in range(start // KEY_BLOCK, -(-stop // KEY_BLOCK)):
        first = block * KEY_BLOCK
        yield block, slice(max(start - first, 0), min(stop - first, KEY_BLOCK))


def _value_steps(kv_cache, start: int, stop: int):
    """The steps of values that positions start to stop lie in, and which parts of them they are."""
    per_step = kv_cache.v.shape[-1]
    if start % per_step and start < stop:
        yield slice(start // per_step, start // per_step + 1), slice(start % per_step, None)
        start += per_step - start % per_step
    whole = stop // per_step
    if start < stop:
        yield slice(start // per_step, whole), slice(None)
        yield slice(whole, -(-stop // per_step)), slice(stop % per_step)


def _clear_rest(kv_cache, slot: int, stop: int) -> None:
    """What shares a step with the last position is read with a weight of 0, and 0 * NaN would be NaN."""
    per_step = kv_cache.v.shape[-1]
    if stop % per_step:
        kv_cache.v[:, slot, :, stop // per_step, :, stop % per_step :] = 0


def _encoded(kv_cache, values: np.ndarray) -> np.ndarray:
    if values.dtype == kv_cache.k.dtype:
        return values
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)  # to bfloat16, ties to even
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
