"""Phases over rows: embeddings, layer norm and copies. Sums are float32, in a fixed order of 16 lanes."""

import numpy as np

from ..dtypes import element_at
from ..jit import kernel
from ..simd.tiles import OUT_TILE
from ..simd.vector_ir import LANES, address, float32_at, sum_lanes, sum_squares_lanes
from ..team import claim_rows, complete_rows, finish_phase
from .activations import NONE
from .linear import REPLACE, linear
from .operands import put
from .ranks import share_rows

ONE_LAYER = np.int64(0)  # see activations.py


@kernel
def layer_norm(team, out, x, rows, norm, layer, epsilon):
    """Row i of the operand `out` = layer norm of x[rows[i]]. A phase; needs C values of scratch."""
    normed = float32_at(address(team.scratch), x.shape[1])
    weight = norm.weight[layer]
    bias = norm.bias[layer]
    first, last = claim_rows(team, rows.size)
    while first >= 0:
        for i in range(first, last):
            row = float32_at(address(x) + rows[i] * x.shape[1] * 4, x.shape[1])
            normalize(normed, row, weight, bias, epsilon)
            put(out, i, 0, normed)
        complete_rows(team, rows.size)
        first, last = claim_rows(team, rows.size)
    finish_phase(team)


@kernel
def put_rows(team, out, x, rows):
    first, last = claim_rows(team, rows.size)
    while first >= 0:
        for i in range(first, last):
            put(out, i, 0, float32_at(address(x) + rows[i] * x.shape[1] * 4, x.shape[1]))
        complete_rows(team, rows.size)
        first, last = claim_rows(team, rows.size)
    finish_phase(team)


@kernel
def norm_if_any(team, out, x, rows, norm, layer, epsilon):
    if norm is None:
        return
    layer_norm(team, out, x, rows, norm, layer, epsilon)


@kernel
def norm_or_copy(team, out, x, rows, norm, layer, epsilon):
    """Row i of the operand `out` = layer norm of x[rows[i]], or the row as it is without a norm."""
    if norm is None:
        put_rows(team, out, x, rows)
    else:
        layer_norm(team, out, x, rows, norm, layer, epsilon)


@kernel
def normalize(out, x, weight, bias, epsilon):
    n = x.size
    mean = _sum(x) / np.float32(n)
    for c in range(n):
        out[c] = x[c] - mean
    scale = np.float32(1) / np.sqrt(_sum_squares(out) / np.float32(n) + epsilon)
    for c in range(n):
        out[c] = out[c] * scale * weight[c] + bias[c]


@kernel
def _sum(x):
    vectors = x.size // LANES
    total = sum_lanes(address(x), vectors) if vectors else np.float32(0)
    for i in range(vectors * LANES, x.size):
        total += x[i]
    return total


@kernel
def _sum_squares(x):
    vectors = x.size // LANES
    total = sum_squares_lanes(address(x), vectors) if vectors else np.float32(0)
    for i in range(vectors * LANES, x.size):
        total += x[i] * x[i]
    return total


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
            panel = token_ids[n] // OUT_TILE
            column = token_ids[n] % OUT_TILE
            for c in range(x.shape[1]):
                x[n, c] = element_at(wte, panel, c, column) * wte_factors[c] + position_at(
                    wpe, positions[n], c
                )
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


@kernel
def embed_rows(team, project_in, params, x, step, b):
    p = params
    if project_in is None:
        embed_tokens(team, x, step.token_ids, step.embeds, step.positions, p.wte, p.wte_factors, p.wpe)
    else:
        rows = b.embedded.values  # (N, E)
        embed_tokens(team, rows, step.token_ids, step.embeds, step.positions, p.wte, p.wte_factors, None)
        put_rows(team, b.to_project, rows, b.every[: x.shape[0]])  # (N, E)
        linear(team, x, b.to_project, project_in.linear, ONE_LAYER, project_in.segments, NONE, REPLACE)
        add_positions(team, x, step.positions, p.wpe)
    share_rows(team, x, b.ranks)
