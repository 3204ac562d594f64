"""GPT-2 on the CPU: the page of kernels/reference/model.py, over packed weights and preallocated buffers.

Below it are several decode steps in a call, and the final layer norm by itself.

Shapes: N new tokens, S sequences, C n_embd, E width of embeddings, F n_inner, V vocabulary, L layers, R rows of logits.
All threads run the whole step (see team.py).
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from ..reference.layers import normalize
from .arrays import Params
from .jit import inline, kernel
from .kv_cache import KVCache
from .layers.activations import NONE
from .layers.attention import attend, distances_of, write_kv
from .layers.experts import expert_block, has_experts, mlp_row
from .layers.hooks import (
    ATTENDED,
    HEADS,
    MIDDLE,
    STREAM,
    SUMMAND,
    call_hooks,
    first_layer,
    inner_linear,
    run_with_hooks,
)
from .layers.linear import ATTN_PROJ, C_ATTN, MLP_PROJ, REPLACE, add_adapters, add_projection, linear
from .layers.operands import quantize_activations
from .layers.rows import ONE_LAYER, embed_rows, norm_if_any, norm_or_copy
from .sampling import sample
from .sampling_rows import MAX_ENDS, choose_greatest, is_last_step
from .screen import plan_screen, score_tokens
from .team import begin_step, join_step
from .workspace import Workspace, fill, step_of


def forward(params: Params, batch, kv_cache: KVCache, workspace: Workspace, look=None) -> np.ndarray:
    fill(workspace.buffers, batch)
    plan_screen(params, workspace.buffers, batch.drawn_by)
    if look is None:
        workspace.team.run(take_steps, params, kv_cache, workspace.buffers)
    else:
        run_with_hooks(take_steps, params, batch, kv_cache, workspace, look)
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
        for layer in range(first_layer(buffers.hooks), layers):
            call_hooks(team, buffers.hooks, STREAM, layer)
            attention_block(team, params, layer, x, step, kv_cache, buffers)
            norm_if_any(team, buffers.stream, x, every, params.ln_1_after, layer, params.epsilon)
            call_hooks(team, buffers.hooks, MIDDLE, layer)
            if has_experts(params.experts, layer):
                expert_block(team, params.experts, params, layer, x, buffers)
            else:
                mlp_block(team, params, layer, x, buffers)
            norm_if_any(team, buffers.stream, x, every, params.ln_2_after, layer, params.epsilon)
        call_hooks(team, buffers.hooks, STREAM, layers)
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
    norm_or_copy(team, b.normed, x, b.every[:n], params.ln_1_before, layer, params.epsilon)
    linear(team, qkv, b.normed, params.c_attn, layer, params.embd_segments, NONE, REPLACE)  # (N, 3C)
    add_adapters(team, qkv, b.normed.values, params.adapters, C_ATTN, layer, step.token_slots)
    call_hooks(team, b.hooks, HEADS, layer)
    write_kv(team, k, v, qkv, step.positions, step.token_slots, step.tiles)
    distances = distances_of(params.distances, layer)
    attend(team, attended, qkv, k, v, step.positions, step.token_slots, step.tiles, scale, distances)
    add_adapters(team, x, attended, params.adapters, ATTN_PROJ, layer, step.token_slots)
    call_hooks(team, b.hooks, ATTENDED, layer)
    quantize_activations(team, b.heads, attended, params.attended_factors, layer)
    add_projection(team, x, b.heads, params.attn_proj, layer, params.head_segments, b.ranks)


@inline
def mlp_block(team, params, layer, x, buffers):
    """x (N, C) += c_proj(activation(c_fc(ln_2(x))))."""
    b = buffers
    n = x.shape[0]
    row = mlp_row(params.experts, layer)
    slots = b.step.token_slots[:n]
    norm_or_copy(team, b.normed, x, b.every[:n], params.ln_2_before, layer, params.epsilon)
    inner_linear(team, b.hooks, params.adapters, params, row, layer, slots, b)  # (N, F)
    add_adapters(team, x, b.inner.values, params.adapters, MLP_PROJ, layer, slots)
    call_hooks(team, b.hooks, SUMMAND, layer)
    add_projection(team, x, b.inner, params.mlp_proj, row, params.inner_segments, b.ranks)


@inline
def head(team, params, x, step, buffers):
    """logits (R, V) = ln_f(x[logit_rows]) @ lm_head.T."""
    logits = buffers.logits[: step.logit_rows.size]
    norm_or_copy(team, buffers.final, x, step.logit_rows, params.ln_f, ONE_LAYER, params.epsilon)  # (R, C)
    b, segments = buffers, params.embedding_segments
    score_tokens(
        team, params.project_out, params.lm_head, segments, logits, b.final, b.to_score, b.screen, b.logits
    )


def multi_step(
    params: Params,
    batch,
    kv_cache: KVCache,
    workspace: Workspace,
    warpers,
    seeds,
    sample_indices,
    num_steps: int,
    ends,
) -> Iterable[np.ndarray]:
    if warpers.temperature.any():
        draws = warpers, seeds, sample_indices
        return _drawn(params, batch, kv_cache, workspace, draws, num_steps)
    buffers = workspace.buffers
    choices = workspace.buffers.choices
    fill(buffers, batch, num_steps if ends.size <= MAX_ENDS else 1)
    plan_screen(params, buffers, lambda: warpers)
    choices.num_tokens[: batch.token_ids.size] = np.minimum(warpers.num_tokens, buffers.logits.shape[1])
    choices.num_ends[0] = min(ends.size, MAX_ENDS)
    choices.ends[: choices.num_ends[0]] = ends[:MAX_ENDS]
    workspace.team.run(take_steps, params, kv_cache, buffers)
    return choices.token_ids[: choices.counts[0], : batch.token_ids.size].copy()  # (steps, S)


def stop_early(workspace: Workspace, is_wanted: bool) -> None:
    workspace.buffers.choices.stop_early[0] = is_wanted


def _drawn(
    params: Params, batch, kv_cache: KVCache, workspace: Workspace, draws: tuple, num_steps: int
) -> Iterator[np.ndarray]:
    batch = replace(batch, drawn_by=lambda: draws[0])
    for _ in range(num_steps):
        logits = forward(params, batch, kv_cache, workspace)  # (S, V)
        token_ids = sample(logits, *draws, batch.context_lens)  # (S,)
        yield token_ids
        if workspace.buffers.choices.stop_early[0]:
            break
        batch = batch.next_step(token_ids)


def final_norm(params: Params, x: np.ndarray) -> np.ndarray:
    """Return ln_f of x (N, C) without the head's smoothing, which divided its weight and bias."""
    if params.ln_f is None:
        return x
    x = normalize(x, params.ln_f.weight[0], params.ln_f.bias[0], params.epsilon)
    return x * params.head_factors if params.project_in is None else x
