"""What is made of a look inside the model: one vector for a text, and who attends to whom."""

import numpy as np

from tinygpt.config import ModelConfig
from tinygpt.errors import RequestError

POOLINGS = {
    "last": lambda states: states[-1],
    "mean": lambda states: states.mean(0),
    "sum": lambda states: states.sum(0),
}


def pool(states: np.ndarray, pooling: str) -> np.ndarray:
    """One vector (C,) float32 of the last hidden states (T, C): the last token's, or the mean or sum of all."""
    return POOLINGS[pooling](states)


def check_pooling(pooling: str) -> None:
    if pooling not in tuple(POOLINGS):
        raise RequestError(f"pooling is {pooling!r} and must be one of {', '.join(map(repr, POOLINGS))}.")


def attention_maps(queries: np.ndarray, keys: np.ndarray, config: ModelConfig) -> np.ndarray:
    """softmax(scale q·k) over the positions up to each query's, (L, H, T, T) float32.

    queries (L, T, C) float32; keys (L, H, T, D) as the cache holds them: float32, or bfloat16 in uint16.
    """
    layers, heads, length, size = keys.shape
    maps = np.zeros((layers, heads, length, length), np.float32)
    is_past = np.tri(length, dtype=bool)  # (T, T)
    for layer in range(layers):
        q = queries[layer].reshape(length, heads, size).swapaxes(0, 1)  # (H, T, D)
        scores = q @ _float32(keys[layer]).swapaxes(1, 2)  # (H, T, T)
        scores *= np.float32(config.attention_scale(layer))
        scores[:, ~is_past] = -np.inf
        np.exp(scores - scores.max(-1, keepdims=True), out=maps[layer])
        maps[layer] /= maps[layer].sum(-1, keepdims=True)
    return maps


def _float32(keys: np.ndarray) -> np.ndarray:
    if keys.dtype == np.uint16:
        return (keys.astype(np.uint32) << 16).view(np.float32)
    return keys.astype(np.float32, copy=False)
