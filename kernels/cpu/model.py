"""GPT-2 on the CPU: the page of kernels/reference/model.py, over packed weights and preallocated buffers.

Shapes: N new tokens, S sequences, C n_embd, E width of embeddings, F n_inner, V vocabulary, L layers, R rows of logits.
All threads run the whole step (see team.py).
"""

import numpy as np

from .arrays import Params
from .jit import inline, kernel
from .kv_cache import KVCache
from .layers.activations import NONE
from .layers.adapters import ATTN_PROJ, C_ATTN, MLP_PROJ, add_low_rank
from .layers.attention import attend, write_kv
from .layers.experts import expert_block, has_experts, mlp_row
from .layers.hooks import ATTENDED, HEADS, MIDDLE, STREAM, SUMMAND, first_layer, inner_linear, look
from .layers.linear import REPLACE, add_projection, linear
from .layers.operands import quantize_activations
from .layers.rows import (
    ONE_LAYER,
    embed_rows,
    norm_after,
    norm_before,
    norm_if_any,
    score_tokens,
)
from .sampling_rows import choose_greatest, is_last_step
from .team import begin_step, join_step
from .workspace import Workspace, fill, step_of


def forward(params: Params, batch, kv_cache: KVCache, workspace: Workspace, look=None) -> np.ndarray:
    fill(workspace.buffers, batch)
    if look is None:
        workspace.team.run(take_steps, params, kv_cache, workspace.buffers)
    else:
        from .hooks import run  # rarely needed

        run(take_steps, params, batch, kv_cache, workspace, look)
    return workspace.buffers.logits[: batch.logit_rows.size]


@kernel
def take_steps(team, leads, params, kv_cache, buffers):
    """Take as many steps as tokens are wanted; a follower takes steps until none comes.

    One function for both, so that it is compiled once.
    """
    to_take = buffers.choices.wanted[0]
    while leads or join_step(team):
        if leads:
            begin_step(team)
        step = step_of(buffers)
        x = buffers.x[: buffers.sizes[0]]
        layers = params.attention_scales.size
        every = buffers.every[: x.shape[0]]
        embed(team, params, x, step, buffers)
        for layer in range(first_layer(buffers.look), layers):
            look(team, buffers.look, STREAM, layer)
            attention_block(team, params, layer, x, step, kv_cache, buffers)
            norm_after(team, buffers.stream, x, every, params.ln_1, layer, params.epsilon)
            look(team, buffers.look, MIDDLE, layer)
            if has_experts(params.experts, layer):
                expert_block(team, params.experts, params, layer, x, buffers)
            else:
                mlp_block(team, params, layer, x, buffers)
            norm_after(team, buffers.stream, x, every, params.ln_2, layer, params.epsilon)
        look(team, buffers.look, STREAM, layers)
        head(team, params, x, step, buffers)
        choose_greatest(team, step, buffers.choices, buffers.logits[: step.logit_rows.size])
        to_take -= 1
        if leads and (to_take <= 0 or is_last_step(buffers.choices)):
            break


@inline
def embed(team, params, x, step, buffers):
    """x (N, C) = wte[token] + wpe[position]; a negative id stands for a row of embeds."""
    b, n = buffers, x.shape[0]
    embed_rows(team, params.project_in, params, x, step, buffers)
    norm_if_any(team, b.stream, x, b.every[:n], params.embed_norm, ONE_LAYER, params.epsilon)


@inline
def attention_block(team, params, layer, x, step, kv_cache, buffers):
    """x (N, C) += c_proj(attention(c_attn(ln_1(x))))."""
    b = buffers
    n = x.shape[0]
    scale = params.attention_scales[layer]
    qkv = b.qkv[:n]
    attended = b.attended[:n]
    k = kv_cache.k[layer]
    v = kv_cache.v[layer]
    norm_before(team, b.normed, x, b.every[:n], params.ln_1, layer, params.epsilon)
    linear(team, qkv, b.normed, params.c_attn, layer, params.embd_segments, NONE, REPLACE)  # (N, 3C)
    add_low_rank(team, qkv, b.normed.values, params.low_rank, C_ATTN, layer, step.token_slots)
    look(team, b.look, HEADS, layer)
    write_kv(team, k, v, qkv, step.positions, step.token_slots, step.tiles)
    attend(team, attended, qkv, k, v, step.positions, step.token_slots, step.tiles, scale, params.alibi)
    add_low_rank(team, x, attended, params.low_rank, ATTN_PROJ, layer, step.token_slots)
    look(team, b.look, ATTENDED, layer)
    quantize_activations(team, b.heads, attended, params.attended_factors, layer)
    add_projection(team, x, b.heads, params.attn_proj, layer, params.head_segments, b.ranks)


@inline
def mlp_block(team, params, layer, x, buffers):
    """x (N, C) += c_proj(activation(c_fc(ln_2(x))))."""
    b = buffers
    n = x.shape[0]
    row = mlp_row(params.experts, layer)
    activation = params.activation
    norm_before(team, b.normed, x, b.every[:n], params.ln_2, layer, params.epsilon)
    c_fc = params.c_fc
    no_factors = params.attn_proj.factors
    segments = params.embd_segments
    low_rank = params.low_rank
    slots = b.step.token_slots[:n]
    inner = b.inner
    x_in = b.normed
    inner_linear(
        team, b.look, low_rank, slots, inner, x_in, c_fc, no_factors, row, layer, segments, activation
    )  # (N, F)
    add_low_rank(team, x, b.inner.values, low_rank, MLP_PROJ, layer, slots)
    look(team, b.look, SUMMAND, layer)
    add_projection(team, x, b.inner, params.mlp_proj, row, params.inner_segments, b.ranks)


@inline
def head(team, params, x, step, buffers):
    """logits (R, V) = ln_f(x[logit_rows]) @ lm_head.T."""
    logits = buffers.logits[: step.logit_rows.size]
    norm_before(team, buffers.final, x, step.logit_rows, params.ln_f, ONE_LAYER, params.epsilon)  # (R, C)
    score_tokens(team, params.project_out, params, logits, buffers)
