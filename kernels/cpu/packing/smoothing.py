"""Smoothing factors for quantized weights, and a correction of biases.

Trained GPT-2s have channels far larger than the rest. Factors of columns divide a linear layer's input (SmoothQuant:
Xiao et al., 2022). Sizes of channels follow from the weights, or from `convert --calibrate`, which also corrects biases
(Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...backend import KINDS, LINEARS, NORM_BEFORE
from ...numbers import from_bfloat16
from ..layers.activations import ACTIVATIONS, activate
from ..simd.grouped_tiles import WEIGHT_GROUP
from ..simd.tiles import OUT_TILE

# The exponent of a channel's size. int4 weights, with 16 levels, gain more than activations.
BALANCE = {"int8": 0.5, "int4": 0.0}
C_PROJ_BALANCE = 0.5
LEAST = 1e-6  # a channel that a layer norm switches off
LEAST_ESTIMATE = 0.25  # times the median: the estimate may be wrong
# Gauss-Hermite quadrature for the mean of a function of a normal variable.
POINTS, SHARES = np.polynomial.hermite_e.hermegauss(15)
BITS = 8  # of a factor: CPUs differ in the last place


@dataclass(frozen=True)
class Smoothing:
    checkpoint: Any
    dtype: str
    calibration: Any = None  # of tinygpt/evaluation: measured sizes
    first_layer: int = 0

    def factors(self, ours: str, index: int, weight: np.ndarray) -> np.ndarray:
        """Return factors (K,) float32 of a weight (N, K)."""
        layer = self.first_layer + index
        if self.dtype not in BALANCE or not self._can_divide(ours):
            return np.ones(weight.shape[1], np.float32)
        measured = None if self.calibration is None else self.calibration.sizes.get(layer_name(ours, layer))
        if measured is not None:
            return smoothing_factors(weight, measured, self.calibration.share)
        if self.checkpoint.config.norm_placement == "post":
            return np.ones(weight.shape[1], np.float32)
        share = BALANCE[self.dtype] if ours in NORM_BEFORE or ours == "lm_head" else C_PROJ_BALANCE
        return smoothing_factors(weight, self._sizes(ours, layer), share)

    def _can_divide(self, ours: str) -> bool:
        config = self.checkpoint.config
        if ours == "lm_head":
            return config.final_norm and config.embed_dim is None
        if config.expert_layers and ours in ("c_fc", "mlp_proj"):  # one norm precedes the gate, too
            return False
        return ours not in NORM_BEFORE or config.norm_placement == "pre"

    def _sizes(self, ours: str, layer: int) -> np.ndarray:
        if ours == "lm_head":
            return np.hypot(*self._norm("ln_f"))
        if ours in NORM_BEFORE:
            return np.hypot(*self._norm(f"h.{layer}.{NORM_BEFORE[ours]}"))
        sizes = self._value_sizes(layer) if ours == "attn_proj" else self._inner_sizes(layer)
        return np.maximum(sizes, LEAST_ESTIMATE * np.median(sizes))

    def _value_sizes(self, layer: int) -> np.ndarray:
        width = self.checkpoint.config.n_embd
        return np.hypot(*self._outputs("c_attn", layer, slice(2 * width, None)))

    def _inner_sizes(self, layer: int) -> np.ndarray:
        mean, spread = self._outputs("c_fc", layer, slice(None))
        values = (mean + spread * POINTS[:, None]).astype(np.float32)  # (points, F)
        activate(values.reshape(-1), ACTIVATIONS[self.checkpoint.config.activation])
        return np.sqrt(np.average(np.square(values, dtype=np.float64), axis=0, weights=SHARES))

    def _outputs(self, ours: str, layer: int, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        name = layer_name(ours, layer)
        weight, bias = (self.checkpoint.tensor(f"{name}.{kind}")[rows] for kind in KINDS)
        norm_weight, norm_bias = self._norm(f"h.{layer}.{NORM_BEFORE[ours]}")
        mean = weight @ norm_bias + bias
        scaled = weight * norm_weight
        self.checkpoint.release(f"{name}.weight")
        return mean, np.sqrt(np.square(scaled, out=scaled).sum(axis=1))

    def _norm(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        weight, bias = (self.checkpoint.tensor(f"{name}.{kind}") for kind in KINDS)
        return weight, bias


def layer_name(ours: str, layer: int) -> str:
    return f"h.{layer}.{LINEARS[ours]}" if ours in LINEARS else ours


def smoothing_factors(weight: np.ndarray, sizes: np.ndarray, share: float) -> np.ndarray:
    """Return factors (K,) float32 of weight (N, K), whose channels have these sizes (K,)."""
    sizes_of_weights = np.abs(weight)
    rows = sizes_of_weights.max(axis=1, keepdims=True)  # (N, 1)
    sizes_of_weights /= np.where(rows > 0, rows, 1)
    largest = sizes_of_weights.max(axis=0)
    largest = np.where(largest > 0, largest, 1)
    factors = np.maximum(sizes, LEAST) ** share / largest ** (1 - share)
    return rounded(factors / np.exp(np.log(factors).mean()))


def rounded(factors: np.ndarray) -> np.ndarray:
    digits, exponents = np.frexp(factors)
    return np.ldexp(np.rint(digits * 2**BITS) / 2**BITS, exponents).astype(np.float32)


def bias_correction(
    weight: np.ndarray, factors: np.ndarray, packed: np.ndarray, means: np.ndarray
) -> np.ndarray:
    """Return (N,) to add to a bias. `packed` (N, K) is weight (N, K) * factors (K,) by `unpack`."""
    return ((weight * factors - packed) @ (means / factors)).astype(np.float32)


def unpack(dtype: str, arrays: tuple[np.ndarray, ...], n: int, k: int) -> np.ndarray:
    panels, scales = arrays
    if dtype == "int8":
        values = _in_order(panels.astype(np.float32) - 128)  # (P, K, OUT_TILE)
        values *= scales.reshape(-1, 1, OUT_TILE)
    else:
        both = np.stack([panels & 15, panels >> 4], axis=2)  # (P, K / 8, 2, OUT_TILE, 4): two steps
        values = _in_order(both.reshape(len(panels), -1, OUT_TILE, 4).astype(np.float32))
        groups = from_bfloat16(scales)  # (P, K / WEIGHT_GROUP, 2, OUT_TILE)
        scale, offset = (np.repeat(groups[:, :, i], WEIGHT_GROUP, axis=1) for i in (0, 1))  # (P, K, OUT_TILE)
        values = values * scale + offset
    return values.transpose(0, 2, 1).reshape(-1, values.shape[1])[:n, :k]


def _in_order(panels: np.ndarray) -> np.ndarray:
    return panels.transpose(0, 1, 3, 2).reshape(len(panels), -1, OUT_TILE)
