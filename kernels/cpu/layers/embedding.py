"""From tokens to the width C, and from there to logits; embeddings may have a width E, with a matrix on either side."""

import numpy as np

from tinygpt.kernels.cpu.jit import kernel, overload_by_dtype
from tinygpt.kernels.cpu.layers.activations import NONE
from tinygpt.kernels.cpu.layers.formats import BFloat16Weight, Float32Weight, Int8Weight
from tinygpt.kernels.cpu.layers.linear import REPLACE, linear, linear_to_operand
from tinygpt.kernels.cpu.layers.operands import from_bfloat16
from tinygpt.kernels.cpu.layers.ranks import share_rows
from tinygpt.kernels.cpu.layers.rows import ONE_LAYER, put_rows
from tinygpt.kernels.cpu.runtime.team import claim_rows, complete_rows, finish_phase
from tinygpt.kernels.cpu.simd.tiles import OUT_TILE


@kernel
def embed_tokens(team, x, token_ids, embeds, positions, wte, wte_factors, wpe):
    """x (N, C) = wte[token] * wte_factors + wpe[position]; embeds (N, C) for tokens below 0. A phase."""
    first, last = claim_rows(team, token_ids.size)
    while first >= 0:
        for n in range(first, last):
            if token_ids[n] < 0:
                for c in range(x.shape[1]):
                    x[n, c] = embeds[n, c] + position_at(wpe, positions[n], c)
                continue
            panel, column = token_ids[n] // OUT_TILE, token_ids[n] % OUT_TILE
            for c in range(x.shape[1]):
                x[n, c] = weight_at(wte, panel, c, column) * wte_factors[c] + position_at(wpe, positions[n], c)
        complete_rows(team, token_ids.size)
        first, last = claim_rows(team, token_ids.size)
    finish_phase(team)


@kernel
def add_positions(team, x, positions, wpe):
    first, last = claim_rows(team, positions.size)
    while first >= 0:
        for n in range(first, last):
            for c in range(x.shape[1]):
                x[n, c] += position_at(wpe, positions[n], c)
        complete_rows(team, positions.size)
        first, last = claim_rows(team, positions.size)
    finish_phase(team)


@kernel
def position_at(wpe, position, c):
    if wpe is None:
        return np.float32(0)
    return wpe[position, c]


def _float32_at(weight, panel, k, column):
    return weight.panels[0, panel, k, column]


def _bfloat16_at(weight, panel, k, column):
    return from_bfloat16(weight.panels[0, panel, k // 2, column, k % 2])


def _int8_at(weight, panel, k, column):
    level = np.int32(weight.panels[0, panel, k // 4, column, k % 4]) - np.int32(128)
    return np.float32(level) * weight.scales[0, panel * OUT_TILE + column]


weight_at = overload_by_dtype({Float32Weight: _float32_at, BFloat16Weight: _bfloat16_at, Int8Weight: _int8_at})


@kernel
def embed_rows(team, project_in, params, x, step, b):
    p = params
    if project_in is None:
        embed_tokens(team, x, step.token_ids, step.embeds, step.positions, p.wte, p.wte_factors, p.wpe)  # (N, C)
    else:
        rows = b.embedded.values
        embed_tokens(team, rows, step.token_ids, step.embeds, step.positions, p.wte, p.wte_factors, None)  # (N, E)
        put_rows(team, b.to_project, rows, b.every[: x.shape[0]])  # (N, E)
        linear(team, x, b.to_project, project_in.linear, ONE_LAYER, project_in.segments, NONE, REPLACE)  # (N, C)
        add_positions(team, x, step.positions, p.wpe)  # (N, C)
    share_rows(team, x, b.ranks)  # (N, C)


@kernel
def score_tokens(team, project_out, params, logits, b):
    segments = params.embedding_segments
    if project_out is None:
        linear(team, logits, b.final, params.lm_head, ONE_LAYER, segments, NONE, REPLACE)  # (R, V)
    else:
        rows = logits.shape[0]
        linear_to_operand(team, b.to_score, b.final, project_out.linear, ONE_LAYER, project_out.segments, NONE, rows)
        linear(team, logits, b.to_score, params.lm_head, ONE_LAYER, segments, NONE, REPLACE)  # (R, V)
