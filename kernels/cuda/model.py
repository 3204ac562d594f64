"""GPT-2 on a GPU: the page of kernels/reference/model.py as kernels that are queued one after another.

Shapes: N new tokens, C n_embd, F n_inner, V vocabulary, R rows with logits.
"""

from functools import partial

import numpy as np

from ..backend import no_op
from .kv_cache import KVCache
from .launches import add_projection, attend, embed_tokens, heads_of, normed_linear, show
from .layers.epilogue import LOGITS, QKV
from .params import Params
from .sampling.sampling import DeviceLogits
from .shapes import StepShape
from .workspace import Workspace, fill

HEAD_LAYER = 0  # ln_f and the head are one layer


def forward(params: Params, batch, kv_cache: KVCache, workspace: Workspace, look=None) -> DeviceLogits:
    """Queue a step. Return logits (R, V) float32, which the next step overwrites."""
    shape = StepShape.of(batch, workspace.max_shape)
    fill(workspace, batch)
    if look is None:
        workspace.graphs.run(shape, lambda: queue_step(params, shape, kv_cache, workspace))
    else:  # the host waits at each point
        queue_step(
            params, shape, kv_cache, workspace, partial(show, look, kv_cache, workspace, batch), look.first
        )
    return DeviceLogits(workspace, np.arange(batch.logit_rows.size), params.config.vocab_size)


def queue_step(
    params: Params, shape: StepShape, kv_cache: KVCache, workspace: Workspace, look=no_op, first: int = 0
) -> None:
    x = workspace.x
    embed(params, x, shape, workspace)
    if first:
        look("resid_post", first - 1)
    for layer in range(first, params.config.n_layer):
        look("resid_pre", layer)
        attention_block(params, layer, x, shape, kv_cache, workspace)
        look("q", layer)
        look("resid_mid", layer)
        mlp_block(params, layer, x, shape, workspace)
        look("resid_post", layer)
    head(params, x, shape, workspace)


def embed(params: Params, x, shape: StepShape, workspace: Workspace) -> None:
    """x (N, C) = wte[token] + wpe[position], or a row of embeds for a token with a negative id."""
    embed_tokens(params, x, shape, workspace)


def attention_block(
    params: Params, layer: int, x, shape: StepShape, kv_cache: KVCache, workspace: Workspace
) -> None:
    """x (N, C) += c_proj(attention(c_attn(ln_1(x))))."""
    qkv = heads_of(kv_cache, workspace)
    attended = workspace.attended
    normed_linear(params, "ln_1", "c_attn", layer, qkv, x, shape, workspace, QKV)  # (N, 3C)
    attend(params, layer, attended, kv_cache, shape, workspace)
    add_projection(params, "attn_proj", layer, x, attended, shape, workspace)


def mlp_block(params: Params, layer: int, x, shape: StepShape, workspace: Workspace) -> None:
    """x (N, C) += c_proj(activation(c_fc(ln_2(x))))."""
    inner = workspace.inner
    activation = params.config.activation
    normed_linear(params, "ln_2", "c_fc", layer, inner, x, shape, workspace, activation)  # (N, F)
    add_projection(params, "mlp_proj", layer, x, inner, shape, workspace)


def head(params: Params, x, shape: StepShape, workspace: Workspace) -> None:
    """logits (R, V) = ln_f(x[logit_rows]) @ lm_head.T."""
    if shape.logits:
        logits = workspace.logits
        normed_linear(params, "ln_f", "lm_head", HEAD_LAYER, logits, x, shape, workspace, LOGITS)
