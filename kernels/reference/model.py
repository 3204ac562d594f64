"""GPT-2 in NumPy, float64 inside: the specification that the other backends are tested against.

Shapes: N new tokens of the step, S sequences, T cached positions, C n_embd, H heads, D head size,
F n_inner, V vocabulary, L layers, R rows whose logits are wanted. Weights are (out, in).
Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), and its code.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

LAYERS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")


@dataclass(frozen=True)
class Params:
    """The checkpoint's tensors under their own names, and its config."""

    config: Any
    tensors: dict[str, np.ndarray]

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[name]


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every position, preallocated and written in place."""

    k: np.ndarray  # (L, S, H, T, D)
    v: np.ndarray  # (L, S, H, T, D)


def load_params(checkpoint, dtype: str = "float32", threads: int = 1) -> Params:
    """Take the tensors as they are: the reference reads them in place."""
    layers = range(checkpoint.config.n_layer)
    names = ["wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias", "lm_head.weight"]
    names += [f"h.{i}.{layer}.{kind}" for i in layers for layer in LAYERS for kind in ("weight", "bias")]
    return Params(checkpoint.config, {name: checkpoint.tensor(name) for name in names})


def new_kv_cache(config, max_num_seqs: int, max_model_len: int, dtype: str = "float32") -> KVCache:
    shape = (config.n_layer, max_num_seqs, config.n_head, max_model_len, config.head_size)
    return KVCache(np.zeros(shape), np.zeros(shape))


def kv_cache_bytes(config, max_num_seqs: int, max_model_len: int, dtype: str = "float32") -> int:
    return 2 * 8 * config.n_layer * max_num_seqs * max_model_len * config.n_embd


def new_workspace(config, max_num_tokens: int, max_num_logits: int, threads: int = 1, dtype: str = "float32") -> None:
    """The reference allocates as it goes; the other backends return their step buffers here."""


def forward(params: Params, batch, cache: KVCache, workspace=None) -> np.ndarray:
    """Run one step: write its keys and values into the cache and return logits (R, V) float32."""
    x = embed(params, batch)  # (N, C)
    for layer in range(params.config.n_layer):
        x = x + attention_block(params, layer, x, batch, cache)  # (N, C)
        x = x + mlp_block(params, layer, x)  # (N, C)
    x = layer_norm(params, "ln_f", x[batch.logit_rows])  # (R, C)
    return (x @ params["lm_head.weight"].T).astype(np.float32)  # (R, V)


def trace(params: Params, batch, cache: KVCache, workspace=None) -> tuple[np.ndarray, np.ndarray]:
    """Run a step as `forward` and look inside: hidden states (L + 1, N, C) and queries (L, N, C), float32.

    The hidden states are Hugging Face's: the input of each layer, and last what ln_f makes of the output.
    """
    x, hidden, queries = embed(params, batch), [], []
    for layer in range(params.config.n_layer):
        hidden.append(x)
        qkv = linear(params, f"h.{layer}.attn.c_attn", layer_norm(params, f"h.{layer}.ln_1", x))  # (N, 3C)
        queries.append(qkv[:, : x.shape[1]])
        x = x + attention_block(params, layer, x, batch, cache)  # (N, C)
        x = x + mlp_block(params, layer, x)  # (N, C)
    hidden.append(layer_norm(params, "ln_f", x))
    return np.array(hidden, np.float32), np.array(queries, np.float32)


def embed(params: Params, batch) -> np.ndarray:
    """wte[token] + wpe[position] (N, C); a row of batch.embeds stands for a token whose id is negative."""
    is_given = batch.token_ids < 0  # (N,)
    x = params["wte.weight"][np.where(is_given, 0, batch.token_ids)].astype(np.float64)  # (N, C)
    if is_given.any():
        x[is_given] = batch.embeds[-1 - batch.token_ids[is_given]]
    return x + params["wpe.weight"][batch.positions]


def attention_block(params: Params, layer: int, x: np.ndarray, batch, cache: KVCache) -> np.ndarray:
    """Causal self-attention of the new tokens over their sequences' caches. x and result: (N, C)."""
    heads = (len(x), params.config.n_head, params.config.head_size)
    x = layer_norm(params, f"h.{layer}.ln_1", x)  # (N, C)
    qkv = linear(params, f"h.{layer}.attn.c_attn", x)  # (N, 3C)
    q, k, v = (part.reshape(heads) for part in np.split(qkv, 3, axis=1))  # (N, H, D)
    out = np.empty(heads)  # (N, H, D)
    for s, row in enumerate(batch.slots):
        new = slice(batch.seq_starts[s], batch.seq_starts[s + 1])
        positions, length = batch.positions[new], batch.context_lens[s]
        cache.k[layer, row, :, positions] = k[new]
        cache.v[layer, row, :, positions] = v[new]
        out[new] = attend(
            q[new],
            cache.k[layer, row, :, :length],  # (H, T, D)
            cache.v[layer, row, :, :length],  # (H, T, D)
            positions,
            params.config.attention_scale(layer),
        )
    return linear(params, f"h.{layer}.attn.c_proj", out.reshape(x.shape))  # (N, C)


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


def mlp_block(params: Params, layer: int, x: np.ndarray) -> np.ndarray:
    """Two linear layers with an activation between them. x and result: (N, C)."""
    x = layer_norm(params, f"h.{layer}.ln_2", x)  # (N, C)
    x = linear(params, f"h.{layer}.mlp.c_fc", x)  # (N, F)
    x = ACTIVATIONS[params.config.activation](x)
    return linear(params, f"h.{layer}.mlp.c_proj", x)  # (N, C)


def linear(params: Params, name: str, x: np.ndarray) -> np.ndarray:
    """x (N, in) -> (N, out)."""
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def layer_norm(params: Params, name: str, x: np.ndarray) -> np.ndarray:
    """Each row to mean 0 and variance 1, then gain and bias. x (N, C)."""
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    normed = centred / np.sqrt(variance + params.config.layer_norm_epsilon)
    return normed * params[f"{name}.weight"] + params[f"{name}.bias"]


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
