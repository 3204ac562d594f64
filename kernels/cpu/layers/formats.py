"""Records of weights and activations. Weights lie in panels of OUT_TILE columns, by steps of K."""

from typing import Any, NamedTuple

import numpy as np


class Float32Weight(NamedTuple):
    panels: np.ndarray  # (L, P, K, OUT_TILE) float32


class BFloat16Weight(NamedTuple):
    panels: np.ndarray  # (L, P, K / 2, OUT_TILE, 2) uint16, K rounded up to 2


class Int8Weight(NamedTuple):
    """weight[n, k] = (panels - 128) * scales[n]."""

    panels: np.ndarray  # (L, P, K / 4, OUT_TILE, 4) uint8, K rounded up to SCALE_GROUP
    scales: np.ndarray  # (L, P * OUT_TILE) float32


class Int4Weight(NamedTuple):
    """weight[n, k] = nibble * scale + offset."""

    panels: np.ndarray  # (L, P, K / 8, OUT_TILE, 4) uint8: step 2i in the low half of byte i
    group_scales: np.ndarray  # (L, P, K / WEIGHT_GROUP, 2, OUT_TILE) uint16: bfloat16 scale, offset


class Float32Operand(NamedTuple):
    values: np.ndarray  # (N, K) float32


class BFloat16Operand(NamedTuple):
    values: np.ndarray  # (N, K rounded up to 2) uint16, or float32 with bfloat16's precision


class Int8Operand(NamedTuple):
    """x[n, k] = values[n, k] * scales[n, k / SCALE_GROUP, 0], quantized per token."""

    values: np.ndarray  # (N, K rounded up to SCALE_GROUP) int8, or int16: see targets.py
    # (N, G, 4) float32: scale; -128 times the group's sum (int32 bits); scale times the sum of each half
    scales: np.ndarray


class Linear(NamedTuple):
    weight: Any  # (L, N, K), a record above
    bias: np.ndarray  # (L, N) float32, or (1, 0) for none
    factors: np.ndarray  # (L, P * OUT_TILE) float32: smoothing factors of the outputs, or (1, 0)


class Norm(NamedTuple):
    weight: np.ndarray  # (L, C) float32
    bias: np.ndarray  # (L, C) float32


class Projection(NamedTuple):
    """A matrix between the embeddings' width and the model's."""

    linear: Linear
    segments: np.ndarray  # (2,)  all of K


class Alibi(NamedTuple):
    slopes: np.ndarray  # (H,) float32


class Experts(NamedTuple):
    places: np.ndarray  # (L,) int64: place among the layers with experts, or -1 - place among the others
    gate: np.ndarray  # (M, E, C) float32, of M layers with experts
    c_fc: Linear  # (M * E, F, C)
    mlp_proj: Linear  # (M * E, C, F)
    sums_to_one: bool  # whether chosen experts' weights are scaled
