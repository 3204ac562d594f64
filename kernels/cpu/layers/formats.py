"""How weights and activations are held, one NamedTuple for each: Numba compiles by its type.

Weights lie in panels of PANEL output columns, step by step along K, so that a tile reads a panel from its first byte
to its last. The layer axis comes first; wte and the head are one layer.
"""

from typing import Any, NamedTuple

import numpy as np


class Float32Weight(NamedTuple):
    panels: np.ndarray  # (L, P, K, PANEL) float32


class BFloat16Weight(NamedTuple):
    panels: np.ndarray  # (L, P, K / 2, PANEL, 2) uint16, K rounded up to 2


class Int8Weight(NamedTuple):
    """weight[n, k] = (panels - 128) * scales[n]."""

    panels: np.ndarray  # (L, P, K / 4, PANEL, 4) uint8, K rounded up to GROUP
    scales: np.ndarray  # (L, P * PANEL) float32


class Int4Weight(NamedTuple):
    """weight[n, k] = nibble * scale + offset, with a scale and an offset for each WEIGHT_GROUP of K and each n."""

    panels: np.ndarray  # (L, P, K / 8, PANEL, 4) uint8, K rounded up to GROUP; step 2i in the low half of byte i
    group_scales: np.ndarray  # (L, P, K / WEIGHT_GROUP, 2, PANEL) uint16: bfloat16 scale, offset


class Float32Operand(NamedTuple):
    values: np.ndarray  # (N, K) float32


class BFloat16Operand(NamedTuple):
    values: np.ndarray  # (N, K rounded up to 2) uint16, or float32 rounded to bfloat16: see simd/targets.py


class Int8Operand(NamedTuple):
    """x[n, k] = values[n, k] * scales[n, k / GROUP, 0]: quantised per token, so that neighbours do not matter."""

    values: np.ndarray  # (N, K rounded up to GROUP) int8, or int16 where the CPU multiplies those
    # (N, G, 4) float32: scale; -128 times the group's sum, an int32's bits; scale times the sum of each of its halves
    scales: np.ndarray


class Linear(NamedTuple):
    """A kind of linear layer, in all layers of the model."""

    weight: Any  # (L, N, K), one of the records above
    bias: np.ndarray  # (L, N) float32, or (1, 0) for none
    # (L, P * PANEL) float32: what an output is multiplied by for the next product, see packing/smoothing.py; or (1, 0)
    factors: np.ndarray


class Norm(NamedTuple):
    """A kind of layer norm, in all layers of the model."""

    weight: np.ndarray  # (L, C) float32
    bias: np.ndarray  # (L, C) float32


class PostNorm(NamedTuple):
    """One that stands behind its block, where it makes the residual stream."""

    weight: np.ndarray  # (L, C) float32
    bias: np.ndarray  # (L, C) float32


class Projection(NamedTuple):
    """A matrix between the width of the embeddings, E, and the model's."""

    linear: Linear
    segments: np.ndarray  # (2,)  all of its K


class Alibi(NamedTuple):
    slopes: np.ndarray  # (H,) float32


class Experts(NamedTuple):
    """The experts of all layers that have any, one after another."""

    places: np.ndarray  # (L,) int64: a layer's place among those with experts; -1 - its place among the others
    gate: np.ndarray  # (layers with experts, E, C) float32
    c_fc: Linear  # (layers with experts * E, F, C)
    mlp_proj: Linear  # (layers with experts * E, C, F)
    sums_to_one: bool  # whether the weights of those chosen are scaled so


class Nothing(NamedTuple):
    """What a model does not have: it stands in the place of a record above, or of an array."""

    nothing: np.ndarray  # (0,)
