"""Factors that even out channels before they are quantised.

Trained GPT-2s have a few channels far larger than the rest, which would use up the levels of all that share a scale
with them. What goes into a linear layer may be divided, channel by channel, by what the layer's columns are multiplied
by, with the function left as it is (SmoothQuant: Xiao et al., 2022). Behind a layer norm the division is the norm's own
weight and bias. Attended values and activations are multiplied where they are quantised for `c_proj`.

How large a channel is comes from the weights alone: no text is run. A layer norm's output has variance 1 before its
weight and bias, so that mean and variance of what a linear layer makes of it are known. `convert --calibrate` measures
it on a text instead.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygpt.kernels.backend import KINDS, LINEARS, NORM_BEFORE
from tinygpt.kernels.cpu.layers.activations import ACTIVATIONS, activate

# How much of a channel's size goes into the activations. int4 weights have a scale for every 32 weights along K and
# 16 levels only, so that behind a layer norm the weights are the side to make even.
BALANCE = {"int8": 0.5, "int4": 0.0}
C_PROJ_BALANCE = 0.5
LEAST = 1e-6  # a channel that a layer norm switches off
# Of the median: a channel that is estimated to be smaller is taken for so large. The estimate may be wrong, and a
# channel that is small needs no help.
LEAST_ESTIMATE = 0.25
# Points and weights for the mean of a function of a normal variable, by Gauss and Hermite.
POINTS, SHARES = np.polynomial.hermite_e.hermegauss(15)
BITS = 8  # of a factor: where two CPUs' roots and sums differ in the last place, these do not


@dataclass(frozen=True)
class Smoothing:
    """The factors of a checkpoint's linear layers, packed as `dtype`."""

    checkpoint: Any
    dtype: str
    calibration: Any = None  # of tinygpt/evaluation: sizes by a text in place of the weights'

    def factors(self, ours: str, layer: int, weight: np.ndarray) -> np.ndarray:
        """(K,) float32 for a linear layer by our name, "lm_head" included, whose weight is (N, K)."""
        if self.dtype not in BALANCE or not self._can_divide(ours):
            return np.ones(weight.shape[1], np.float32)
        measured = None if self.calibration is None else self.calibration.sizes.get(layer_name(ours, layer))
        if measured is not None:
            return smoothing_factors(weight, measured, self.calibration.share)
        if self.checkpoint.config.norm_placement == "post":  # what comes into a layer is known by no norm of its own
            return np.ones(weight.shape[1], np.float32)
        share = BALANCE[self.dtype] if ours in NORM_BEFORE or ours == "lm_head" else C_PROJ_BALANCE
        return smoothing_factors(weight, self._sizes(ours, layer), share)

    def _can_divide(self, ours: str) -> bool:
        """Whether what is divided goes into this layer alone: a norm behind a block makes the residual stream too."""
        config = self.checkpoint.config
        if ours == "lm_head":
            return config.final_norm and config.embed_dim is None
        if config.expert_layers and ours in ("c_fc", "mlp_proj"):  # one norm stands before the gate too
            return False
        return ours not in NORM_BEFORE or config.norm_placement == "pre"

    def _sizes(self, ours: str, layer: int) -> np.ndarray:
        """(K,): how large the channels are that go into a linear layer."""
        if ours == "lm_head":
            return np.hypot(*self._norm("ln_f"))
        if ours in NORM_BEFORE:
            return np.hypot(*self._norm(f"h.{layer}.{NORM_BEFORE[ours]}"))
        sizes = self._value_sizes(layer) if ours == "attn_proj" else self._inner_sizes(layer)
        return np.maximum(sizes, LEAST_ESTIMATE * np.median(sizes))

    def _value_sizes(self, layer: int) -> np.ndarray:
        """(C,) of the values that attention takes means of."""
        width = self.checkpoint.config.n_embd
        return np.hypot(*self._outputs("c_attn", layer, slice(2 * width, None)))

    def _inner_sizes(self, layer: int) -> np.ndarray:
        """(F,) of what the activation makes of c_fc's outputs: its root mean square where they are normal."""
        mean, spread = self._outputs("c_fc", layer, slice(None))
        values = (mean + spread * POINTS[:, None]).astype(np.float32)  # (points, F)
        activate(values.reshape(-1), ACTIVATIONS[self.checkpoint.config.activation])
        return np.sqrt(np.average(np.square(values, dtype=np.float64), axis=0, weights=SHARES))

    def _outputs(self, ours: str, layer: int, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of a linear layer's outputs behind its layer norm, each (N,)."""
        name = layer_name(ours, layer)
        weight, bias = (self.checkpoint.tensor(f"{name}.{kind}")[rows] for kind in KINDS)
        norm_weight, norm_bias = self._norm(f"h.{layer}.{NORM_BEFORE[ours]}")
        mean, scaled = weight @ norm_bias + bias, weight * norm_weight
        self.checkpoint.release(f"{name}.weight")
        return mean, np.sqrt(np.square(scaled, out=scaled).sum(axis=1))

    def _norm(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        weight, bias = (self.checkpoint.tensor(f"{name}.{kind}") for kind in KINDS)
        return weight, bias


def layer_name(ours: str, layer: int) -> str:
    """The checkpoint's name of a linear layer; the head has none that is measured."""
    return f"h.{layer}.{LINEARS[ours]}" if ours in LINEARS else ours


def smoothing_factors(weight: np.ndarray, sizes: np.ndarray, share: float) -> np.ndarray:
    """Factors (K,) float32 to multiply the columns of weight (N, K) by, and to divide channels of these sizes (K,) by.

    Each row of a weight has scales of its own and is measured by its largest weight: that it is large as a whole says
    nothing about a column.
    """
    sizes_of_weights = np.abs(weight)  # (N, K)
    rows = sizes_of_weights.max(axis=1, keepdims=True)  # (N, 1)
    sizes_of_weights /= np.where(rows > 0, rows, 1)
    largest = sizes_of_weights.max(axis=0)  # (K,)
    largest = np.where(largest > 0, largest, 1)
    factors = np.maximum(sizes, LEAST) ** share / largest ** (1 - share)
    return rounded(factors / np.exp(np.log(factors).mean()))


def rounded(factors: np.ndarray) -> np.ndarray:
    """To BITS bits, as float32."""
    digits, exponents = np.frexp(factors)
    return np.ldexp(np.rint(digits * 2**BITS) / 2**BITS, exponents).astype(np.float32)
