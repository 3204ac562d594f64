"""A look inside a step: the residual stream before each layer, and the queries."""

import numpy as np

from tinygpt.kernels.reference.kv_cache import KVCache
from tinygpt.kernels.reference.layers import expert_block, final_norm, norm_behind, queries_keys_values
from tinygpt.kernels.reference.model import attention_block, embed, mlp_block
from tinygpt.kernels.reference.params import Params


def trace(params: Params, batch, kv_cache: KVCache, workspace=None) -> tuple[np.ndarray, np.ndarray]:
    """Run a step as `forward` and look inside: hidden states (L + 1, N, C) and queries (L, N, C), float32.

    The hidden states are Hugging Face's: the input of each layer, and last what ln_f makes of the output.
    """
    x, hidden, queries = embed(params, batch), [], []
    for layer in range(params.config.n_layer):
        hidden.append(x.copy())
        queries.append(queries_keys_values(params, layer, x)[0].reshape(x.shape))  # (N, C)
        attention_block(params, layer, x, batch, kv_cache)
        norm_behind(params, f"h.{layer}.ln_1", x)
        (expert_block if layer in params.config.expert_layers else mlp_block)(params, layer, x)
        norm_behind(params, f"h.{layer}.ln_2", x)
    hidden.append(final_norm(params, x))
    return np.array(hidden, np.float32), np.array(queries, np.float32)
