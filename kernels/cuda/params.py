"""A model's weights on the device, in panels of 8 features, packed once from a checkpoint's tensors.

In a panel's step of 64 of K, lane 4 g + q holds 16 numbers of feature g; a warp reads 512 contiguous bytes a load:
    bfloat16: two loads of 8 numbers, k = 32 h + 8 q + i
    int8: one load of 16 numbers, in the same order
    float32: four loads of 4 numbers, k = 16 p + 4 q + i
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..backend import KINDS, LINEARS, NORMS, DeviceError
from ..numbers import stacked, to_bfloat16
from .runtime import device as devices

OUT_TILE = 8  # features of a panel
STEP = 64
STEP_SIZE = OUT_TILE * STEP  # numbers
# Every kernel sums K in 8 runs of whole steps, each in order, then the runs in order.
SEGMENTS = 8
ARRAY_TYPES = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}


class Weights(NamedTuple):
    """A linear layer of every layer."""

    panels: Any  # (L, features, K)
    scales: Any  # (L, num_panels * OUT_TILE) float32
    bias: Any  # (L, features) float32
    num_panels: int
    num_steps: int
    features: int


class NormWeights(NamedTuple):
    """A layer norm of every layer."""

    weight: Any  # (L, C) float32
    bias: Any  # (L, C) float32


@dataclass(frozen=True)
class Params:
    device: Any
    config: Any
    dtype: str
    wte: Weights  # one layer of (V, C), without bias
    wpe: Any  # (n_positions, C) float32
    linears: dict[str, Weights]  # by the names of LINEARS, and lm_head, which is wte if the head is tied
    norms: dict[str, NormWeights]  # (L, C) of ln_1 and ln_2, (1, C) of ln_f
    final_norm: NormWeights  # ln_f on the host


def check_model(config: Any) -> None:
    if config.differences:
        raise DeviceError(
            f"the model has {', '.join(config.differences)}, which no kernel for a GPU computes."
        )


def load_params(checkpoint: Any, dtype: str = "float32", threads: int = 1) -> Params:
    device = devices.the_device()
    config = checkpoint.config
    layers = range(checkpoint.config.n_layer)

    def weights(names: list[str], bias: np.ndarray) -> Weights:
        n, k = checkpoint.tensor(names[0]).shape
        panels = device.zeros((len(names), panel_count(n) * OUT_TILE, padded_columns(k)), array_type(dtype))
        scales = np.empty((len(names), panel_count(n) * OUT_TILE), np.float32)
        size = panels.size // len(names)
        for i, name in enumerate(names):  # one matrix at a time is in memory twice
            packed, scales[i] = pack(checkpoint.tensor(name), dtype)
            device.write(panels[i * size : (i + 1) * size], packed)
            checkpoint.release(name)
        return Weights(panels, device.array(scales), device.array(bias), panel_count(n), step_count(k), n)

    no_bias = np.zeros(1, np.float32)
    wte = weights(["wte.weight"], no_bias)
    final_norm = NormWeights(*(np.array(checkpoint.tensor(f"ln_f.{kind}")) for kind in KINDS))
    norms = {"ln_f": NormWeights(*map(device.array, final_norm))}
    for norm in NORMS:
        kinds = [stacked(checkpoint, [f"h.{i}.{norm}.{kind}" for i in layers]) for kind in KINDS]
        norms[norm] = NormWeights(*map(device.array, kinds))
    linears = {"lm_head": wte if checkpoint.tied else weights(["lm_head.weight"], no_bias)}
    for ours, name in LINEARS.items():
        bias = stacked(checkpoint, [f"h.{i}.{name}.bias" for i in layers])
        linears[ours] = weights([f"h.{i}.{name}.weight" for i in layers], bias)
    return Params(
        device=device,
        config=config,
        dtype=dtype,
        wte=wte,
        wpe=device.array(checkpoint.tensor("wpe.weight")),
        linears=linears,
        norms=norms,
        final_norm=final_norm,
    )


def params_bytes(config: Any, dtype: str, tied: bool) -> int:
    C = config.n_embd
    F = config.inner_size
    V = config.vocab_size
    L = config.n_layer
    shapes = [(3 * C, C), (C, C), (F, C), (C, F)]
    per_layer = sum(_linear_bytes(n, k, dtype) + 4 * n for n, k in shapes) + 4 * 4 * C
    tables = (1 if tied else 2) * (_linear_bytes(V, C, dtype) + 4)  # a missing bias is an array of one number
    return L * per_layer + tables + 4 * C * (config.n_positions + 2)


def _linear_bytes(n: int, k: int, dtype: str) -> int:
    return panel_count(n) * OUT_TILE * (padded_columns(k) * item_bytes(dtype) + 4)


def array_type(dtype: str) -> Any:
    return ARRAY_TYPES[dtype]


def item_bytes(dtype: str) -> int:
    return np.dtype(array_type(dtype)).itemsize


def activation_dtype(dtype: str) -> str:
    """Return the dtype of activations."""
    return "float32" if dtype == "float32" else "bfloat16"


def panel_count(n: int) -> int:
    return -(-n // OUT_TILE)


def step_count(k: int) -> int:
    return -(-k // STEP)


def padded_columns(columns: int) -> int:
    return step_count(columns) * STEP


def pack(weight: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return weight (N, K) float32 as flat panels, padded with zeros, and a scale for each feature, 1 unless int8."""
    n, k = weight.shape
    panels, steps = panel_count(n), step_count(k)
    padded = np.zeros((panels * OUT_TILE, steps * STEP), np.float32)
    padded[:n, :k] = weight
    scales = np.ones(panels * OUT_TILE, np.float32)
    if dtype == "float32":
        by_lane = padded.reshape(panels, OUT_TILE, steps, 4, 4, 4).transpose(
            0, 2, 3, 1, 4, 5
        )  # (P, steps, p, g, q, i)
    elif dtype == "bfloat16":
        lanes = to_bfloat16(padded).reshape(panels, OUT_TILE, steps, 2, 4, 8)
        by_lane = lanes.transpose(0, 2, 3, 1, 4, 5)  # (P, steps, h, g, q, i)
    else:
        greatest = np.abs(padded).max(1)
        scales = np.where(greatest > 0, greatest / np.float32(127), np.float32(1)).astype(np.float32)
        lanes = np.rint(padded / scales[:, None]).astype(np.int8).reshape(panels, OUT_TILE, steps, 2, 4, 8)
        by_lane = lanes.transpose(0, 2, 1, 4, 3, 5)  # (P, steps, g, q, h, i)
    return np.ascontiguousarray(by_lane).ravel(), scales
