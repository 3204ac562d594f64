"""The layers of the page: attention, the linear layer, layer norm, experts and activations."""

import math

import numpy as np

from ..backend import no_op
from ..numbers import is_hidden, softmax
from .state import Params, to_int8

INT8_BLOCK = 64
WEIGHT_LEVELS = 2**14 - 1


def attend(q, k, v, positions, attention, look=no_op) -> np.ndarray:
    """Return softmax(scale q·k - slope * distance) v of q (N, H, D), k and v (H, T, D).

    attention: of ModelConfig.
    """
    return np.einsum("nht,htd->nhd", attention_weights(q, k, positions, attention, look), v)


def attention_weights(q, k, positions, attention, look=no_op) -> np.ndarray:
    scores = attention.scale * np.einsum("nhd,htd->nht", q, k)  # (N, H, T)
    back = positions[:, None] - np.arange(k.shape[1])  # (N, T)
    if attention.slopes:
        scores -= np.float32(attention.slopes)[:, None] * back[:, None, :].astype(np.float64)
    scores = np.where(is_hidden(back, attention.window)[:, None, :], -np.inf, scores)
    look("attn_scores", scores)
    weights = softmax(scores)
    look("pattern", weights)
    return weights  # (N, H, T)


def attend_int8(q, k, v, positions, attention, look=no_op) -> np.ndarray:
    """Attend with int8 queries, and weights of INT8_BLOCK positions as whole numbers."""
    q, q_scales = to_int8(q)  # (N, H, D), (N, H, 1)
    weights = attention_weights(q * q_scales, k, positions, attention, look)
    v, v_scales = to_int8(v)  # (H, T, D), (H, T, 1)
    weights = weights * v_scales[..., 0]  # (N, H, T)
    attended = np.zeros_like(q)
    for start in range(0, k.shape[1], INT8_BLOCK):
        block = slice(start, start + INT8_BLOCK)
        numbers, scales = to_int8(weights[..., block], WEIGHT_LEVELS)  # (N, H, block), (N, H, 1)
        attended += scales * np.einsum("nht,htd->nhd", numbers, v[:, block])
    return attended


def linear(params: Params, name: str, x: np.ndarray) -> np.ndarray:
    if params.watch is not None:
        params.watch(name, x)
    y = x @ params[f"{name}.weight"].T + params[f"{name}.bias"]
    for i, adapter in enumerate(params.adapters):
        rows = np.flatnonzero(params.of_row == i)
        if name in adapter and rows.size:
            down, up = adapter[name]
            y[rows] += x[rows] @ down.T @ up.T
    return y


def add_projection(params: Params, name: str, x: np.ndarray, y: np.ndarray, look=no_op) -> None:
    """x (N, C) += linear(y): tensor-parallel ranks sum here."""
    summand = linear(params, name, y)
    look(summand)
    x += summand


def norm_before(params: Params, name: str, x: np.ndarray) -> np.ndarray:
    """Return the layer norm of x (N, C), or x if the norm is after the block."""
    return layer_norm(params, name, x) if params.config.norm_placement == "pre" else x


def norm_after(params: Params, name: str, x: np.ndarray) -> None:
    if params.config.norm_placement == "post":
        x[:] = layer_norm(params, name, x)


def final_norm(params: Params, x: np.ndarray) -> np.ndarray:
    return layer_norm(params, "ln_f", x) if params.config.final_norm else x


def layer_norm(params: Params, name: str, x: np.ndarray) -> np.ndarray:
    weight = params[f"{name}.weight"]
    bias = params[f"{name}.bias"]
    return normalize(x, weight, bias, params.config.layer_norm_epsilon)


def normalize(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, epsilon: float) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return centred / np.sqrt(variance + epsilon) * weight + bias


def queries_keys_values(params: Params, layer: int, x: np.ndarray) -> list[np.ndarray]:
    """Return c_attn(ln_1(x)) in three parts (N, H, D)."""
    heads = (len(x), params.config.n_head, params.config.head_size)
    normed = norm_before(params, f"h.{layer}.ln_1", x)
    qkv = linear(params, f"h.{layer}.attn.c_attn", normed)  # (N, 3C)
    return [part.reshape(heads) for part in np.split(qkv, 3, axis=1)]


def expert_block(params: Params, layer: int, x: np.ndarray) -> None:
    """x (N, C) += each row's experts, weighted."""
    name = f"h.{layer}.mlp"
    normed = norm_before(params, f"h.{layer}.ln_2", x)  # (N, C)
    chosen, shares = choose_experts(params, name, normed)  # (N, k) each
    y = np.zeros_like(x)
    for kth in range(chosen.shape[1]):
        for expert in np.unique(chosen[:, kth]):
            rows = np.flatnonzero(chosen[:, kth] == expert)
            inner = linear(params, f"{name}.experts.{expert}.c_fc", normed[rows])  # (rows, F)
            inner = ACTIVATIONS[params.config.activation](inner)
            y[rows] += shares[rows, kth, None] * linear(params, f"{name}.experts.{expert}.c_proj", inner)
    x += y


def choose_experts(params: Params, name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows' most probable experts, ties to the first, and weights, (N, k) each."""
    config = params.config
    scores = x @ params[f"{name}.gate.weight"].T  # (N, E)
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, : config.experts_per_token]  # (N, k)
    shares = np.take_along_axis(softmax(scores), chosen, axis=1)
    if config.norm_topk_prob:
        shares = shares / shares.sum(-1, keepdims=True)
    return chosen, shares


def gelu_tanh(x):
    """Return the tanh approximation of GELU (Hendrycks and Gimpel, 2016)."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu(x):
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
