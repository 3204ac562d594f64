"""A look inside a step: the residual stream before each layer, and the queries."""

import numpy as np

from tinygpt.kernels.cpu.kv_cache import KVCache
from tinygpt.kernels.cpu.layers.formats import Nothing, Projection
from tinygpt.kernels.cpu.model import take_steps
from tinygpt.kernels.cpu.params import Params
from tinygpt.kernels.cpu.workspace import Workspace, fill
from tinygpt.kernels.reference.layers import normalise


def trace(params: Params, batch, kv_cache: KVCache, workspace: Workspace) -> tuple[np.ndarray, np.ndarray]:
    """Run a step as `forward` and look inside: hidden states (L + 1, N, C) and queries (L, N, C), float32.

    The hidden states are Hugging Face's: the input of each layer, and last what ln_f makes of the output.
    """
    layers, n, c = params.attention_scales.size, batch.token_ids.size, workspace.buffers.x.shape[1]
    width = workspace.buffers.attended.shape[1]  # C, or what a rank has of it
    hidden, queries = np.empty((layers + 1, n, c), np.float32), np.empty((layers, n, width), np.float32)
    fill(workspace.buffers, batch)
    workspace.team.run(take_steps, params, kv_cache, workspace.buffers._replace(hidden=hidden, queries=queries))
    hidden[-1] = final_norm(params, hidden[-1])
    return hidden, queries


def final_norm(params: Params, x: np.ndarray) -> np.ndarray:
    """ln_f of x (N, C), if there is one, as it was before the head's smoothing divided its weight and bias."""
    if isinstance(params.ln_f, Nothing):
        return x
    x = normalise(x, params.ln_f.weight[0], params.ln_f.bias[0], params.epsilon)
    return x if isinstance(params.project_in, Projection) else x * params.head_factors
