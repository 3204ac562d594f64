"""Factors that even out channels before they are quantised.

Trained GPT-2s have a few channels far larger than the rest. A layer norm and the matrix behind it can be rescaled
channel by channel, one divided by what the other is multiplied by, with the function left as it is (SmoothQuant:
Xiao et al., 2022). The factors come from the weights alone: no text is run.
"""

import numpy as np

# How much of a channel's size goes into the activations: half for int8. int4 weights have a scale for every 32
# weights along K and 16 levels only, so that the weights are the side to make even.
BALANCE = {"int8": 0.5, "int4": 0.0}
LEAST = 1e-6  # a channel that a layer norm switches off


def smoothing_factors(weight: np.ndarray, norm_weight: np.ndarray, norm_bias: np.ndarray, dtype: str) -> np.ndarray:
    """Factors (K,) float32 to multiply the columns of weight (N, K) by, and to divide the norm's weight and bias by.

    sqrt(weight^2 + bias^2) of a norm is the size of a channel that leaves a layer norm.
    """
    if dtype not in BALANCE:
        return np.ones(weight.shape[1], np.float32)
    channel = np.maximum(np.sqrt(norm_weight**2 + norm_bias**2), LEAST)
    largest = np.abs(weight).max(axis=0)  # (K,)
    largest = np.where(largest > 0, largest, 1)
    factors = channel ** BALANCE[dtype] / largest ** (1 - BALANCE[dtype])
    return (factors / np.exp(np.log(factors).mean())).astype(np.float32)
