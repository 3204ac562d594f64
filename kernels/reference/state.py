"""The checkpoint's weights, and the KV cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Params:
    """The checkpoint's tensors. watch(name, x) sees each linear layer's input x (N, in).

    adapters: of LoRA, {name of a linear layer: (down (r, in), up (out, r))}.
    """

    config: Any
    tensors: dict[str, np.ndarray]
    watch: Callable[[str, np.ndarray], None] | None = None
    adapters: Sequence[dict[str, tuple]] = ()
    of_slot: Any = None  # (slots,) the adapter of each slot of the KV cache, -1 for none
    of_row: Any = None  # (N,) during a step

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[name]


def load_params(checkpoint, dtype: str = "float32", threads: int = 1) -> Params:
    names = dict.fromkeys([*checkpoint.stored, "lm_head.weight"])
    return Params(checkpoint.config, {name: checkpoint.tensor(name) for name in names})


def with_adapters(
    params: Params, config, adapters: list[dict[str, tuple]], num_slots: int
) -> tuple[Params, np.ndarray]:
    of_slot = np.full(num_slots, -1, np.int32)
    return replace(params, adapters=adapters, of_slot=of_slot), of_slot


@dataclass(frozen=True)
class KVCache:
    k: np.ndarray  # (L, S, H, T, D)
    v: np.ndarray  # (L, S, H, T, D)
    dtype: str


def new_kv_cache(config, num_slots: int, max_model_len: int, dtype: str = "float32") -> KVCache:
    shape = (config.n_layer, num_slots, config.n_head, max_model_len, config.head_size)
    return KVCache(np.zeros(shape), np.zeros(shape), dtype)


def kv_cache_bytes(config, num_slots: int, max_model_len: int, dtype: str = "float32") -> int:
    return 2 * 8 * config.n_layer * num_slots * max_model_len * config.n_embd


def write_kv(
    kv_cache: KVCache, layer: int, slot: int, positions: np.ndarray, k: np.ndarray, v: np.ndarray
) -> None:
    for array, new in ((kv_cache.k, k), (kv_cache.v, v)):
        array[layer, slot, :, positions] = _kept(kv_cache, new)


def copy_positions(kv_cache: KVCache, source_slot: int, target_slot: int, start: int, stop: int) -> None:
    for array in (kv_cache.k, kv_cache.v):
        array[:, target_slot, :, start:stop] = array[:, source_slot, :, start:stop]


def read_positions(
    kv_cache: KVCache, slot: int, start: int, stop: int, head_size: int
) -> tuple[np.ndarray, np.ndarray]:
    return kv_cache.k[:, slot, :, start:stop].copy(), kv_cache.v[:, slot, :, start:stop].copy()


def write_positions(kv_cache: KVCache, slot: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
    for array, values in ((kv_cache.k, k), (kv_cache.v, v)):
        array[:, slot, :, start : start + values.shape[2]] = _kept(kv_cache, values)


def _kept(kv_cache: KVCache, x: np.ndarray) -> np.ndarray:
    if kv_cache.dtype != "int8":
        return x
    numbers, scales = to_int8(x)
    return numbers * scales


def to_int8(x: np.ndarray, levels: int = 127) -> tuple[np.ndarray, np.ndarray]:
    """Return whole numbers (..., D), the largest `levels`, and scales (..., 1) of float32's precision, in float64."""
    scales = (np.abs(x).max(-1, keepdims=True) / levels).astype(np.float32).astype(np.float64)  # (..., 1)
    return np.rint(x / np.where(scales == 0, 1, scales)), scales
