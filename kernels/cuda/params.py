"""From a checkpoint's tensors to arrays on the device, and the memory that a model takes there, counted beforehand."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygpt.kernels.cuda.layers.attention import CHUNK
from tinygpt.kernels.cuda.layers.linear import Weights
from tinygpt.kernels.cuda.packing.layout import PANEL, STEP, pack, panel_count, step_count
from tinygpt.kernels.cuda.runtime import device as devices
from tinygpt.kernels.names import KINDS, LINEARS, NORMS

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class Params:
    """A model on the device."""

    device: Any
    config: Any
    dtype: str
    wte: Weights  # one layer of (V, C), and no bias
    lm_head: Weights  # the same arrays where the head is tied
    wpe: Any  # (n_positions, C) float32
    linears: dict[str, Weights]  # by the names of LINEARS
    norms: dict[str, tuple[Any, Any]]  # gain and bias (L, C) of ln_1, ln_2, and (1, C) of ln_f
    final_norm: tuple[np.ndarray, np.ndarray]  # ln_f on the host


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every position, preallocated and written in place; attention.py has the layouts."""

    device: Any
    k: Any
    v: Any
    num_layers: int
    num_slots: int
    num_heads: int
    padded_len: int
    head_size: int
    padded_head: int
    is_float32: bool


def family_of(dtype: str) -> str:
    """The precision that activations are kept in beside weights of `dtype`."""
    return "float32" if dtype == "float32" else "bfloat16"


def padded_head(head_size: int) -> int:
    return -(-head_size // 32) * 32


def padded_columns(columns: int) -> int:
    return step_count(columns) * STEP


def load_params(checkpoint: Any, dtype: str = "float32", threads: int = 1) -> Params:
    """Pack every weight and copy it to the card; `checkpoint` is as in the CPU's load_params."""
    device, config, layers = devices.card(), checkpoint.config, range(checkpoint.config.n_layer)

    def weights(names: list[str], bias: np.ndarray) -> Weights:
        n, k = checkpoint.tensor(names[0]).shape
        panels = device.zeros((len(names), panel_count(n) * PANEL, step_count(k) * STEP), array_type(dtype))
        scales, size = np.empty((len(names), panel_count(n) * PANEL), np.float32), panels.size // len(names)
        for i, name in enumerate(names):  # one matrix at a time is in memory twice
            packed, scales[i] = pack(checkpoint.tensor(name), dtype)
            device.write(panels[i * size : (i + 1) * size], packed)
            checkpoint.release(name)
        return Weights(panels, device.array(scales), device.array(bias), panel_count(n), step_count(k), n)

    def stacked(names: list[str]) -> np.ndarray:
        return np.stack([checkpoint.tensor(name) for name in names])

    no_bias = np.zeros(1, np.float32)
    wte = weights(["wte.weight"], no_bias)
    final_norm = checkpoint.tensor("ln_f.weight"), checkpoint.tensor("ln_f.bias")
    norms = {"ln_f": tuple(map(device.array, final_norm))}
    for norm in NORMS:
        kinds = [stacked([f"h.{i}.{norm}.{kind}" for i in layers]) for kind in KINDS]
        norms[norm] = tuple(map(device.array, kinds))
    return Params(
        device=device,
        config=config,
        dtype=dtype,
        wte=wte,
        lm_head=wte if checkpoint.tied else weights(["lm_head.weight"], no_bias),
        wpe=device.array(checkpoint.tensor("wpe.weight")),
        linears={
            ours: weights([f"h.{i}.{name}.weight" for i in layers], stacked([f"h.{i}.{name}.bias" for i in layers]))
            for ours, name in LINEARS.items()
        },
        norms=norms,
        final_norm=tuple(np.array(part) for part in final_norm),
    )


def array_type(dtype: str) -> Any:
    return {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}[dtype]


def params_bytes(config: Any, dtype: str, tied: bool) -> int:
    """What `load_params` takes of the card's memory."""
    C, F, V, L = config.n_embd, config.inner_size, config.vocab_size, config.n_layer
    shapes = [(3 * C, C), (C, C), (F, C), (C, F)]
    per_layer = sum(_linear_bytes(n, k, dtype) + 4 * n for n, k in shapes) + 4 * 4 * C
    return L * per_layer + (1 if tied else 2) * _linear_bytes(V, C, dtype) + 4 * C * (config.n_positions + 2)


def _linear_bytes(n: int, k: int, dtype: str) -> int:
    features = panel_count(n) * PANEL
    return features * (step_count(k) * STEP * ITEM_BYTES[dtype] + 4)


def new_kv_cache(config: Any, num_slots: int, max_model_len: int, dtype: str = "float32") -> KVCache:
    device = devices.card()
    shape = _cache_shape(config, num_slots, max_model_len)
    kind = np.float32 if dtype == "float32" else np.uint16
    layers, rows, heads, length, padded = shape
    k, v = device.zeros(shape, kind), device.zeros(shape, kind)
    return KVCache(device, k, v, layers, rows, heads, length, config.head_size, padded, dtype == "float32")


def kv_cache_bytes(config: Any, num_slots: int, max_model_len: int, dtype: str = "float32") -> int:
    """What `new_kv_cache` takes of the card's memory."""
    return 2 * (4 if dtype == "float32" else 2) * math.prod(_cache_shape(config, num_slots, max_model_len))


def _cache_shape(config: Any, rows: int, length: int) -> tuple[int, int, int, int, int]:
    return config.n_layer, rows, config.n_head, -(-length // CHUNK) * CHUNK, padded_head(config.head_size)
