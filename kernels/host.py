"""Arithmetic in NumPy on what any backend hands out, for the few things that are asked for rarely."""

import numpy as np

from tinygpt.kernels.int8_rows import from_rows


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Of each row of (R, V) float32, in float32 as in transformers. Rows that are not finite give NaN."""
    with np.errstate(invalid="ignore"):
        rows = [row - row.max() for row in logits]  # (V,) each
        return np.stack([row - np.log(np.exp(row).sum()) for row in rows])  # (R, V)


def attention_maps(
    queries: np.ndarray, keys: np.ndarray, scales: list[float], slopes: tuple[float, ...] = ()
) -> np.ndarray:
    """softmax(scale q·k) over the positions up to each query's, (L, H, T, T) float32.

    queries (L, T, C) float32; keys (L, H, T, D) as they are read of a KV cache: float32, bfloat16 in uint16, or rows of
    int8_rows.py; scales (L,); slopes (H,) of ALiBi, or (): none.
    """
    layers, heads, length, _ = keys.shape
    maps = np.zeros((layers, heads, length, length), np.float32)
    is_past = np.tri(length, dtype=bool)  # (T, T)
    back = np.subtract.outer(np.arange(length), np.arange(length)).astype(np.float32)  # (T, T)
    for layer in range(layers):
        q = queries[layer].reshape(length, heads, -1).swapaxes(0, 1)  # (H, T, D)
        scores = q @ _float32(keys[layer]).swapaxes(1, 2)  # (H, T, T)
        scores *= np.float32(scales[layer])
        if slopes:
            scores -= np.float32(slopes)[:, None, None] * back
        scores[:, ~is_past] = -np.inf
        np.exp(scores - scores.max(-1, keepdims=True), out=maps[layer])
        maps[layer] /= maps[layer].sum(-1, keepdims=True)
    return maps


def _float32(keys: np.ndarray) -> np.ndarray:
    if keys.dtype == np.uint16:
        return (keys.astype(np.uint32) << 16).view(np.float32)
    if keys.dtype == np.int8:
        return from_rows(keys)
    return keys.astype(np.float32, copy=False)
