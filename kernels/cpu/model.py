"""GPT-2 on the CPU: the same page as kernels/reference/model.py, over packed weights and preallocated buffers.

Shapes: N new tokens of the step, S sequences, T cached positions, C n_embd, H heads, D head size,
F n_inner, V vocabulary, L layers, R rows whose logits are wanted, P panels of PANEL columns.

All threads run the whole step; each kernel is a phase of it (see runtime/team.py).
"""

import numpy as np

from tinygpt.kernels.cpu.jit import inline, kernel
from tinygpt.kernels.cpu.kv_cache import KVCache
from tinygpt.kernels.cpu.layers.activations import NONE
from tinygpt.kernels.cpu.layers.attention import attend, write_kv
from tinygpt.kernels.cpu.layers.embedding import embed_tokens
from tinygpt.kernels.cpu.layers.layer_norm import layer_norm
from tinygpt.kernels.cpu.layers.linear import REPLACE, add_projection, linear, linear_to_operand
from tinygpt.kernels.cpu.layers.operands import convert
from tinygpt.kernels.cpu.layers.trace import keep_rows
from tinygpt.kernels.cpu.params import Params
from tinygpt.kernels.cpu.runtime.team import begin_step, join_step
from tinygpt.kernels.cpu.workspace import Workspace, fill, step_of

HEAD_LAYER = np.int64(0)  # ln_f and the head are one layer


def forward(params: Params, batch, kv_cache: KVCache, workspace: Workspace) -> np.ndarray:
    """Run one step: write its keys and values into the cache and return logits (R, V) float32.

    The result is a view of the workspace: the next step overwrites it.
    """
    fill(workspace.buffers, batch)
    workspace.team.run(take_steps, params, kv_cache, workspace.buffers)
    return workspace.buffers.logits[: batch.logit_rows.size]


@kernel
def take_steps(team, leads, params, kv_cache, buffers):
    """The leader takes one step, a follower one after another: one function, so that it is compiled once."""
    if leads:
        begin_step(team)
    while leads or join_step(team):
        step, x = step_of(buffers), buffers.x[: buffers.sizes[0]]
        layers = params.attention_scales.size
        embed(team, params, x, step)  # (N, C)
        for layer in range(layers):
            keep_rows(team, buffers.hidden, layer, x)
            attention_block(team, params, layer, x, step, kv_cache, buffers)
            mlp_block(team, params, layer, x, buffers)
        keep_rows(team, buffers.hidden, layers, x)
        head(team, params, x, step, buffers)
        if leads:
            break


@inline
def embed(team, params, x, step):
    """x (N, C) = wte[token] + wpe[position]; a row of embeds stands for a token whose id is negative."""
    tables = params.wte, params.wte_factors, params.wpe
    embed_tokens(team, x, step.token_ids, step.embeds, step.positions, *tables)  # (N, C)


@inline
def attention_block(team, params, layer, x, step, kv_cache, buffers):
    """x (N, C) += c_proj(attention(c_attn(ln_1(x)))): the new tokens over their sequences' caches."""
    b, n, scale = buffers, x.shape[0], params.attention_scales[layer]
    qkv, attended, k, v = b.qkv[:n], b.attended[:n], kv_cache.k[layer], kv_cache.v[layer]
    layer_norm(team, b.normed, x, b.every[:n], params.ln_1, layer, params.epsilon)  # (N, C)
    linear(team, qkv, b.normed, params.c_attn, layer, params.embd_segments, NONE, REPLACE)  # (N, 3C)
    keep_rows(team, b.queries, layer, qkv)
    write_kv(team, k, v, qkv, step.positions, step.token_slots)
    attend(team, attended, qkv, k, v, step.positions, step.token_slots, step.tiles, scale)  # (N, C)
    convert(team, b.heads, attended, params.attended_factors, layer)
    add_projection(team, x, b.heads, params.attn_proj, layer, params.head_segments, b.ranks)  # (N, C)


@inline
def mlp_block(team, params, layer, x, buffers):
    """x (N, C) += c_proj(activation(c_fc(ln_2(x))))."""
    b, n, activation = buffers, x.shape[0], params.activation
    layer_norm(team, b.normed, x, b.every[:n], params.ln_2, layer, params.epsilon)  # (N, C)
    linear_to_operand(team, b.inner, b.normed, params.c_fc, layer, params.embd_segments, activation, n)  # (N, F)
    add_projection(team, x, b.inner, params.mlp_proj, layer, params.inner_segments, b.ranks)  # (N, C)


@inline
def head(team, params, x, step, buffers):
    """logits (R, V) = ln_f(x[logit_rows]) @ lm_head.T."""
    layer_norm(team, buffers.final, x, step.logit_rows, params.ln_f, HEAD_LAYER, params.epsilon)  # (R, C)
    logits, segments = buffers.logits[: step.logit_rows.size], params.embd_segments
    linear(team, logits, buffers.final, params.lm_head, HEAD_LAYER, segments, NONE, REPLACE)  # (R, V)
