"""GPT-2 on the CPU: the same page as kernels/reference/model.py, over packed weights and preallocated buffers.

Shapes: N new tokens of the step, S sequences, T cached positions, C n_embd, H heads, D head size,
F n_inner, V vocabulary, L layers, R rows whose logits are wanted, P panels of PANEL columns.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tinygpt.kernels.cpu.jit import inline, kernel
from tinygpt.kernels.cpu.layers.activations import NONE
from tinygpt.kernels.cpu.layers.attention import attend, write_kv
from tinygpt.kernels.cpu.layers.embedding import embed
from tinygpt.kernels.cpu.layers.layer_norm import layer_norm
from tinygpt.kernels.cpu.layers.linear import ADD, REPLACE, linear, linear_to_operand
from tinygpt.kernels.cpu.layers.operands import convert
from tinygpt.kernels.cpu.layers.trace import final_norm, keep_rows
from tinygpt.kernels.cpu.runtime.team import begin_step, join_step
from tinygpt.kernels.cpu.runtime.team_threads import Crew
from tinygpt.kernels.cpu.simd.tiles import TILE_ROWS

FIRST = np.int64(0)  # wte and the head have one layer


class Params(NamedTuple):
    """Packed weights, one record for all layers of a kind, and the numbers that shape the arithmetic."""

    wte: Any  # (V, C)  one of formats.py, one layer
    wte_factors: np.ndarray  # (C,)    what undoes the head's smoothing where it shares wte
    wpe: np.ndarray  # (n_positions, C)
    ln_1_weight: np.ndarray  # (L, C)
    ln_1_bias: np.ndarray  # (L, C)
    c_attn: Any  # (L, 3C, C)   to q, k, v
    c_attn_bias: np.ndarray  # (L, 3C)
    attn_proj: Any  # (L, C, C)
    attn_proj_bias: np.ndarray  # (L, C)
    ln_2_weight: np.ndarray  # (L, C)
    ln_2_bias: np.ndarray  # (L, C)
    c_fc: Any  # (L, F, C)
    c_fc_bias: np.ndarray  # (L, F)
    mlp_proj: Any  # (L, C, F)
    mlp_proj_bias: np.ndarray  # (L, C)
    ln_f_weight: np.ndarray  # (C,)
    ln_f_bias: np.ndarray  # (C,)
    head_factors: np.ndarray  # (C,)    what ln_f was divided by, and the head multiplied
    lm_head: Any  # (V, C)  one layer; the same arrays as wte where the head is tied
    attention_scales: np.ndarray  # (L,)
    embd_segments: np.ndarray  # (2,)  all of C
    head_segments: np.ndarray  # (5,)  C in four runs of whole heads
    inner_segments: np.ndarray  # (5,)  F in four runs
    epsilon: np.float32
    activation: int


class KVCache(NamedTuple):
    """Keys and values of every position, preallocated and written in place; T is rounded up to KEY_BLOCK."""

    # 4 bytes of a cache hold P values: 1 float32, or 2 bfloat16 (as uint16), which a tile multiplies in one step.
    k: np.ndarray  # (L, S, H, T / KEY_BLOCK, D / P rounded up, KEY_BLOCK, P)
    v: np.ndarray  # (L, S, H, T / P, D rounded up to LANES, P)


class Buffers(NamedTuple):
    """Every array of a step, allocated once for the largest one."""

    x: np.ndarray  # (N, C)   the residual stream
    normed: Any  # (N, C)   an operand of formats.py
    qkv: np.ndarray  # (N, 3C)
    attended: np.ndarray  # (N, C)
    heads: Any  # (N, C)   the operand made of `attended`
    inner: Any  # (N, F)   an operand
    final: Any  # (R, C)   an operand
    logits: np.ndarray  # (R, V)
    every: np.ndarray  # (N,)     0, 1, 2, ...: layer norm of all rows
    hidden: np.ndarray  # (L + 1, N, C) x before each layer and at the end, or (0, 0, 0): not kept
    queries: np.ndarray  # (L, N, C), or (0, 0, 0): not kept
    # The batch, as the kernels need it.
    token_ids: np.ndarray  # (N,)
    embeds: np.ndarray  # (N, C)    in place of the embedding of a token whose id is negative
    positions: np.ndarray  # (N,)
    token_slots: np.ndarray  # (N,)      the cache row of each token
    tiles: np.ndarray  # (N + 1,)  bounds of runs of up to TILE_ROWS tokens of one sequence
    logit_rows: np.ndarray  # (R,)
    sizes: np.ndarray  # (3,)      N, the number of tiles, R


@dataclass(frozen=True)
class Workspace:
    """The buffers of a step, and the threads that share it."""

    buffers: Buffers
    crew: Crew


class Step(NamedTuple):
    """The parts of the buffers that this step's batch fills."""

    token_ids: np.ndarray  # (N,)
    embeds: np.ndarray  # (N, C)
    positions: np.ndarray  # (N,)
    token_slots: np.ndarray  # (N,)
    tiles: np.ndarray  # (tiles + 1,)
    logit_rows: np.ndarray  # (R,)


def forward(params: Params, batch, cache: KVCache, workspace: Workspace) -> np.ndarray:
    """Run one step: write its keys and values into the cache and return logits (R, V) float32.

    The result is a view of the workspace: the next step overwrites it.
    """
    _fill(workspace.buffers, batch)
    workspace.crew.run(_take_steps, params, cache, workspace.buffers)
    return workspace.buffers.logits[: batch.logit_rows.size]


def trace(params: Params, batch, cache: KVCache, workspace: Workspace) -> tuple[np.ndarray, np.ndarray]:
    """Run a step as `forward` and look inside: hidden states (L + 1, N, C) and queries (L, N, C), float32.

    The hidden states are Hugging Face's: the input of each layer, and last what ln_f makes of the output.
    """
    layers, n, c = params.attention_scales.size, batch.token_ids.size, workspace.buffers.x.shape[1]
    hidden, queries = np.empty((layers + 1, n, c), np.float32), np.empty((layers, n, c), np.float32)
    _fill(workspace.buffers, batch)
    workspace.crew.run(_take_steps, params, cache, workspace.buffers._replace(hidden=hidden, queries=queries))
    hidden[-1] = final_norm(params, hidden[-1])
    return hidden, queries


def _fill(buffers: Buffers, batch) -> None:
    """Put the batch where the kernels read it."""
    tiles = query_tiles(batch.seq_starts)
    n, r = batch.token_ids.size, batch.logit_rows.size
    buffers.token_ids[:n] = batch.token_ids
    if batch.embeds.size:
        given = np.flatnonzero(batch.token_ids < 0)
        buffers.embeds[given] = batch.embeds[-1 - batch.token_ids[given]]
    buffers.positions[:n] = batch.positions
    buffers.token_slots[:n] = np.repeat(batch.slots, np.diff(batch.seq_starts))
    buffers.tiles[: tiles.size] = tiles
    buffers.logit_rows[:r] = batch.logit_rows
    buffers.sizes[:] = n, tiles.size - 1, r


@kernel
def _take_steps(team, leads, params, cache, buffers):
    """The leader takes one step, a follower one after another: one function, so that it is compiled once."""
    if leads:
        begin_step(team)
    while leads or join_step(team):
        _forward(team, params, cache, buffers)
        if leads:
            break


@inline
def _forward(team, params, cache, buffers):
    """What each thread of the team does in a step; a kernel is a phase, and they keep in step by phases."""
    b, (n, tiles, r) = buffers, (buffers.sizes[0], buffers.sizes[1], buffers.sizes[2])
    x, logits = b.x[:n], b.logits[:r]
    step = Step(
        b.token_ids[:n], b.embeds[:n], b.positions[:n], b.token_slots[:n], b.tiles[: tiles + 1], b.logit_rows[:r]
    )
    embed(team, x, step.token_ids, step.embeds, step.positions, params.wte, params.wte_factors, params.wpe)  # (N, C)
    layers = params.attention_scales.size
    for layer in range(layers):
        keep_rows(team, b.hidden, layer, x)
        attention_block(team, x, layer, params, cache, buffers, step)
        mlp_block(team, x, layer, params, buffers)
    keep_rows(team, b.hidden, layers, x)
    layer_norm(team, b.final, x, step.logit_rows, params.ln_f_weight, params.ln_f_bias, params.epsilon)  # (R, C)
    no_bias = params.ln_f_bias[:0]
    linear(team, logits, b.final, params.lm_head, FIRST, no_bias, NONE, REPLACE, params.embd_segments)  # (R, V)


@inline
def attention_block(team, x, layer, params, cache, buffers, step):
    """x (N, C) += c_proj(attention(c_attn(ln_1(x)))): the new tokens over their sequences' caches."""
    p, b, n = params, buffers, x.shape[0]
    qkv, attended = b.qkv[:n], b.attended[:n]
    k, v, scale = cache.k[layer], cache.v[layer], p.attention_scales[layer]
    layer_norm(team, b.normed, x, b.every[:n], p.ln_1_weight[layer], p.ln_1_bias[layer], p.epsilon)  # (N, C)
    linear(team, qkv, b.normed, p.c_attn, layer, p.c_attn_bias[layer], NONE, REPLACE, p.embd_segments)  # (N, 3C)
    keep_rows(team, b.queries, layer, qkv)
    write_kv(team, k, v, qkv, step.positions, step.token_slots)
    attend(team, attended, qkv, k, v, step.positions, step.token_slots, step.tiles, scale)  # (N, C)
    convert(team, b.heads, attended)
    linear(team, x, b.heads, p.attn_proj, layer, p.attn_proj_bias[layer], NONE, ADD, p.head_segments)


@inline
def mlp_block(team, x, layer, params, buffers):
    """x (N, C) += c_proj(activation(c_fc(ln_2(x))))."""
    p, b, n = params, buffers, x.shape[0]
    layer_norm(team, b.normed, x, b.every[:n], p.ln_2_weight[layer], p.ln_2_bias[layer], p.epsilon)  # (N, C)
    linear_to_operand(
        team, b.inner, b.normed, p.c_fc, layer, p.c_fc_bias[layer], p.activation, p.embd_segments, n
    )  # (N, F)
    linear(team, x, b.inner, p.mlp_proj, layer, p.mlp_proj_bias[layer], NONE, ADD, p.inner_segments)


def query_tiles(seq_starts: np.ndarray) -> np.ndarray:
    """Cut each sequence's new tokens into runs of up to TILE_ROWS; the bounds of the runs, (tiles + 1,)."""
    starts, stops = seq_starts[:-1], seq_starts[1:]
    if stops[-1] == starts.size:  # one token each, as in decoding
        return seq_starts
    runs = [np.arange(start, stop, TILE_ROWS) for start, stop in zip(starts, stops, strict=True)]
    return np.concatenate([*runs, seq_starts[-1:]])
