"""Moving keys and values in and out of the cache's rows, between steps. The layout is attention.py's.

Positions past those that are put into a slot are nobody's afterwards.
"""

import numpy as np

from tinygpt.kernels.cpu.layers.attention import KEY_BLOCK


def copy_positions(cache, source_slot: int, target_slot: int, start: int, stop: int) -> None:
    """Give positions start to stop of `target_slot` the keys and values of `source_slot`, bit for bit."""
    for block, inside in _key_blocks(start, stop):
        cache.k[:, target_slot, :, block, :, inside] = cache.k[:, source_slot, :, block, :, inside]
    for steps, parts in _value_steps(cache, start, stop):
        cache.v[:, target_slot, :, steps, :, parts] = cache.v[:, source_slot, :, steps, :, parts]
    _clear_rest(cache, target_slot, stop)


def read_positions(cache, slot: int, start: int, stop: int, head_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Copies of a slot's keys and values, each (L, H, stop - start, D), in the cache's type: float32 or uint16."""
    layers, _, heads, blocks, _, _, _ = cache.k.shape
    k = cache.k[:, slot].transpose(0, 1, 2, 4, 3, 5).reshape(layers, heads, blocks * KEY_BLOCK, -1)  # (L, H, T, D)
    v = cache.v[:, slot].swapaxes(-1, -2).reshape(layers, heads, blocks * KEY_BLOCK, -1)  # (L, H, T, padded D)
    return k[:, :, start:stop, :head_size].copy(), v[:, :, start:stop, :head_size].copy()


def write_positions(cache, slot: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
    """Put keys and values (L, H, n, D) into positions start to start + n of a slot.

    They are of the cache's type, as `read_positions` gives them, or float32, which is rounded to it.
    """
    k, v, size, stop = _encoded(cache, k), _encoded(cache, v), k.shape[3], start + k.shape[2]
    per_step = cache.k.shape[-1]
    k = np.pad(k, [(0, 0)] * 3 + [(0, -size % per_step)])  # (L, H, n, D rounded up)
    k = k.reshape(*k.shape[:3], -1, per_step).swapaxes(2, 3)  # (L, H, D / P, n, P)
    for block, inside in _key_blocks(start, stop):
        first = block * KEY_BLOCK + inside.start - start
        cache.k[:, slot, :, block, :, inside] = k[:, :, :, first : first + inside.stop - inside.start]
    for part in range(per_step):  # every P-th position
        first = start + (part - start) % per_step
        values = v[:, :, first - start :: per_step]  # (L, H, n / P, D)
        steps = slice(first // per_step, first // per_step + values.shape[2])
        cache.v[:, slot, :, steps, :size, part] = values
    _clear_rest(cache, slot, stop)


def _key_blocks(start: int, stop: int):
    """The key blocks that positions start to stop lie in, and which part of each they are."""
    for block in range(start // KEY_BLOCK, -(-stop // KEY_BLOCK)):
        first = block * KEY_BLOCK
        yield block, slice(max(start - first, 0), min(stop - first, KEY_BLOCK))


def _value_steps(cache, start: int, stop: int):
    """The steps of values that positions start to stop lie in, and which parts of them they are."""
    per_step = cache.v.shape[-1]
    if start % per_step and start < stop:
        yield slice(start // per_step, start // per_step + 1), slice(start % per_step, None)
        start += per_step - start % per_step
    whole = stop // per_step
    if start < stop:
        yield slice(start // per_step, whole), slice(None)
        yield slice(whole, -(-stop // per_step)), slice(stop % per_step)


def _clear_rest(cache, slot: int, stop: int) -> None:
    """What shares a step with the last position is read with a weight of 0, and 0 * NaN would be NaN."""
    per_step = cache.v.shape[-1]
    if stop % per_step:
        cache.v[:, slot, :, stop // per_step, :, stop % per_step :] = 0


def _encoded(cache, values: np.ndarray) -> np.ndarray:
    if values.dtype == cache.k.dtype:
        return values
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)  # to bfloat16, ties to even
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
