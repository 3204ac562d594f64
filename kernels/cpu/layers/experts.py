"""Experts: a gate chooses MLPs for each token, and each expert computes its own tokens, sorted by expert."""

import numpy as np

from ..dtypes import Tile
from ..jit import kernel
from ..simd.tiles import ROW_BLOCK
from ..team import claim, claim_rows, complete, complete_rows, finish_phase
from .activations import NONE, exp
from .linear import REPLACE, epilogue, prefetch_tile, products, rows_together
from .rows import norm_or_copy, put_rows


@kernel
def choose_experts(team, mixture, experts, place, rows):
    """Choose each row's most probable experts in float64, ties to the first. A phase."""
    normed = mixture.normed.values
    scores = mixture.scores
    first, last = claim_rows(team, rows)
    while first >= 0:
        for n in range(first, last):
            highest = -np.inf
            for e in range(scores.shape[1]):
                total = 0.0
                for c in range(normed.shape[1]):
                    total += np.float64(normed[n, c]) * np.float64(experts.gate[place, e, c])
                scores[n, e] = total
                highest = max(highest, total)
            _choose(mixture.chosen, mixture.shares, scores, n, highest, experts.sums_to_one)
        complete_rows(team, rows)
        first, last = claim_rows(team, rows)
    finish_phase(team)


@kernel
def _choose(chosen, shares, scores, n, highest, sums_to_one):
    count = scores.shape[1]
    all_of_them = 0.0
    all_chosen = 0.0
    for e in range(count):
        all_of_them += exp(np.float32(scores[n, e] - highest))
    for j in range(chosen.shape[1]):
        best = 0
        for e in range(1, count):
            if scores[n, e] > scores[n, best]:
                best = e
        share = exp(np.float32(scores[n, best] - highest)) / all_of_them
        chosen[n, j], shares[n, j] = best, share
        all_chosen += share
        scores[n, best] = -np.inf
    if sums_to_one:
        for j in range(chosen.shape[1]):
            shares[n, j] /= all_chosen


@kernel
def sort_by_expert(team, mixture, rows):
    """Sort pairs: bounds (E + 1,), each pair's row, and its place. A phase of one item."""
    chosen = mixture.chosen
    bounds = mixture.bounds
    order = mixture.order
    places = mixture.places
    item = claim(team, 1)
    while item >= 0:
        pair = 0
        for e in range(bounds.size - 1):
            bounds[e] = pair
            for n in range(rows):
                for j in range(chosen.shape[1]):
                    if chosen[n, j] == e:
                        order[pair], places[n, j] = n, pair
                        pair += 1
        bounds[bounds.size - 1] = pair
        complete(team, 1)
        item = claim(team, 1)
    finish_phase(team)


@kernel
def expert_linear(team, out, x, linears, first_layer, bounds, segments, activation, columns):
    """Compute rows bounds[e] to bounds[e + 1] of out by expert e's linear layer. A phase."""
    weight = linears.weight
    blocks = 0
    for e in range(bounds.size - 1):
        blocks += _blocks(bounds, e)
    items = weight.panels.shape[1] * max(blocks, 1)
    item = claim(team, items)
    while item >= 0:
        panel = item // max(blocks, 1)
        block = item % max(blocks, 1)
        expert = 0
        while block >= _blocks(bounds, expert):
            block -= _blocks(bounds, expert)
            expert += 1
        start = bounds[expert] + block * ROW_BLOCK
        height = rows_together(weight, _blocks(bounds, expert))
        stop = min(start + ROW_BLOCK, bounds[expert + 1])
        for row in range(start, stop, height):
            tile = Tile(min(height, stop - row), row, panel)
            prefetch_tile(out, tile)
            products(weight, x, tile, first_layer + expert, segments, team.scratch)
            epilogue(
                out, tile, linears, first_layer + expert, segments, activation, REPLACE, columns, team.scratch
            )
        complete(team, items)
        item = claim(team, items)
    finish_phase(team)


@kernel
def _blocks(bounds, expert):
    return (bounds[expert + 1] - bounds[expert] + ROW_BLOCK - 1) // ROW_BLOCK


@kernel
def add_experts(team, x, mixture):
    """x (N, C) += each row's experts, weighted, the most probable first. A phase."""
    shares = mixture.shares
    places = mixture.places
    outputs = mixture.outputs
    first, last = claim_rows(team, x.shape[0])
    while first >= 0:
        for n in range(first, last):
            for c in range(x.shape[1]):
                total = np.float32(0)
                for j in range(shares.shape[1]):
                    total += np.float32(shares[n, j]) * outputs[places[n, j], c]
                x[n, c] += total
        complete_rows(team, x.shape[0])
        first, last = claim_rows(team, x.shape[0])
    finish_phase(team)


@kernel
def expert_block(team, experts, params, layer, x, buffers):
    if experts is None:
        return
    b = buffers.mixture
    n = x.shape[0]
    place = experts.places[layer]
    first = place * experts.gate.shape[1]
    bounds = b.bounds
    activation = params.activation
    inner = experts.c_fc.bias.shape[1]
    width = x.shape[1]
    norm_or_copy(team, b.normed, x, buffers.every[:n], params.ln_2_before, layer, params.epsilon)
    choose_experts(team, b, experts, place, n)  # (N, k)
    sort_by_expert(team, b, n)  # (N k,)
    put_rows(team, b.pairs, b.normed.values, b.order[: n * b.chosen.shape[1]])  # (N k, C)
    expert_linear(
        team, b.inner, b.pairs, experts.c_fc, first, bounds, params.embd_segments, activation, inner
    )
    expert_linear(
        team, b.outputs, b.inner, experts.mlp_proj, first, bounds, params.inner_segments, NONE, width
    )
    add_experts(team, x, b)


@kernel
def has_experts(experts, layer):
    if experts is None:
        return False
    return experts.places[layer] >= 0


@kernel
def mlp_row(experts, layer):
    if experts is None:
        return layer
    return -1 - experts.places[layer]
