"""A look inside a step: the residual stream before each layer, and the queries."""

import numpy as np

from tinygpt.kernels.cuda.kv_cache import KVCache
from tinygpt.kernels.cuda.model import attention_block, embed, mlp_block
from tinygpt.kernels.cuda.packing.dtypes import from_bfloat16
from tinygpt.kernels.cuda.params import Params
from tinygpt.kernels.cuda.sizes import Shape
from tinygpt.kernels.cuda.workspace import Workspace, fill
from tinygpt.kernels.reference.layers import normalize


def trace(params: Params, batch, kv_cache: KVCache, workspace: Workspace) -> tuple[np.ndarray, np.ndarray]:
    """Run a step as `forward` and look inside: hidden states (L + 1, N, C) and queries (L, N, C), float32.

    The hidden states are Hugging Face's: the input of each layer, and last what ln_f makes of the output.
    """
    w, x, n, hidden, queries = workspace, workspace.x, batch.token_ids.size, [], []
    shape = Shape.of(batch, w.sizes)
    fill(w, batch)
    embed(params, x, shape, w)
    for layer in range(params.config.n_layer):
        hidden.append(read_rows(w.device, x, n, params.config.n_embd))
        attention_block(params, layer, x, shape, kv_cache, w)
        queries.append(read_queries(kv_cache, w, n))
        mlp_block(params, layer, x, shape, w)
    hidden.append(final_norm(params, read_rows(w.device, x, n, params.config.n_embd)))
    return np.stack(hidden), np.stack(queries)


def read_rows(device, array, count: int, columns: int) -> np.ndarray:
    return device.read(array[: count * columns]).reshape(count, columns)


def read_queries(kv_cache: KVCache, workspace: Workspace, count: int) -> np.ndarray:
    """(N, C) float32"""
    c = kv_cache
    q = read_rows(workspace.device, workspace.q, count, c.num_heads * c.padded_head)
    q = (q if c.is_float32 else from_bfloat16(q)).reshape(count, c.num_heads, c.padded_head)
    return q[..., : c.head_size].reshape(count, -1)


def final_norm(params: Params, x: np.ndarray) -> np.ndarray:
    """ln_f of x (N, C), on the host."""
    return normalize(x, *params.final_norm, params.config.layer_norm_epsilon)
