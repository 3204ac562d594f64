"""The layers of the page: attention, the linear layer, layer norm and the activations."""

import math

import numpy as np

from tinygpt.kernels.reference.params import Params


def attend(q, k, v, positions, scale: float) -> np.ndarray:
    """softmax(scale q·k) v over the keys at or before each query's position.

    q (N, H, D), k and v (H, T, D), positions (N,). Returns (N, H, D).
    """
    scores = scale * np.einsum("nhd,htd->nht", q, k)  # (N, H, T)
    future = np.arange(k.shape[1]) > positions[:, None]  # (N, T)
    scores = np.where(future[:, None, :], -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("nht,htd->nhd", weights, v)  # (N, H, D)


def linear(params: Params, name: str, x: np.ndarray) -> np.ndarray:
    """x (N, in) -> (N, out)."""
    if params.watch is not None:
        params.watch(name, x)
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def add_projection(params: Params, name: str, x: np.ndarray, y: np.ndarray) -> None:
    """x (N, C) += linear(y): the end of each block, and the place where tensor-parallel ranks will sum their shares."""
    x += linear(params, name, y)


def layer_norm(params: Params, name: str, x: np.ndarray) -> np.ndarray:
    """The layer norm `name` of each row of x (N, C)."""
    weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]
    return normalise(x, weight, bias, params.config.layer_norm_epsilon)


def normalise(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, epsilon: float) -> np.ndarray:
    """Each row to mean 0 and variance 1, then weight and bias. x (N, C); its dtype is that of the arithmetic."""
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return centred / np.sqrt(variance + epsilon) * weight + bias


def gelu_tanh(x):
    """The tanh approximation of GELU (Hendrycks and Gimpel, 2016), as GPT-2 was trained."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu(x):
    """x times the normal distribution's share below x. NumPy has no erf, so one value at a time."""
    return 0.5 * x * (1 + _erf(x / np.sqrt(2)))


_erf = np.vectorize(math.erf, otypes=[float])


def quick_gelu(x):
    return x * sigmoid(1.702 * x)


def silu(x):
    return x * sigmoid(x)


def relu(x):
    return np.maximum(x, 0)


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))  # never overflows


ACTIVATIONS = {
    "gelu_tanh": gelu_tanh,
    "gelu": gelu,
    "quick_gelu": quick_gelu,
    "relu": relu,
    "silu": silu,
    "tanh": np.tanh,
}
