"""Token and position embeddings of the new tokens."""

import numpy as np

from tinygpt.kernels.cpu.jit import kernel
from tinygpt.kernels.cpu.layers.formats import BFloat16Weight, Float32Weight, Int8Weight, Nothing
from tinygpt.kernels.cpu.layers.operands import from_bfloat16
from tinygpt.kernels.cpu.runtime.by_type import by_type
from tinygpt.kernels.cpu.runtime.team import claim_rows, complete_rows, finish_phase
from tinygpt.kernels.cpu.simd.tiles import PANEL


@kernel
def embed_tokens(team, x, token_ids, embeds, positions, wte, wte_factors, wpe):
    """x (N, C) = wte[token] * wte_factors + wpe[position]; embeds (N, C) stand for tokens below 0. A phase.

    wte is a weight of one layer, which a tied head shares: token t is column t % PANEL of panel t // PANEL. wpe may be
    Nothing.
    """
    first, last = claim_rows(team, token_ids.size)
    while first >= 0:
        for n in range(first, last):
            if token_ids[n] < 0:
                for c in range(x.shape[1]):
                    x[n, c] = embeds[n, c] + position_at(wpe, positions[n], c)
                continue
            panel, column = token_ids[n] // PANEL, token_ids[n] % PANEL
            for c in range(x.shape[1]):
                x[n, c] = weight_at(wte, panel, c, column) * wte_factors[c] + position_at(wpe, positions[n], c)
        complete_rows(team, token_ids.size)
        first, last = claim_rows(team, token_ids.size)
    finish_phase(team)


@kernel
def add_positions(team, x, positions, wpe):
    """x (N, C) += wpe[position]. A phase."""
    first, last = claim_rows(team, positions.size)
    while first >= 0:
        for n in range(first, last):
            for c in range(x.shape[1]):
                x[n, c] += position_at(wpe, positions[n], c)
        complete_rows(team, positions.size)
        first, last = claim_rows(team, positions.size)
    finish_phase(team)


def _position(wpe, position, c):
    return wpe[position, c]


def _no_position(wpe, position, c):
    return np.float32(0)


# position_at(wpe, position, c): one number of a position's embedding.
position_at = by_type({Nothing: _no_position}, otherwise=_position)


def _float32_at(weight, panel, k, column):
    return weight.panels[0, panel, k, column]


def _bfloat16_at(weight, panel, k, column):
    return from_bfloat16(weight.panels[0, panel, k // 2, column, k % 2])


def _int8_at(weight, panel, k, column):
    level = np.int32(weight.panels[0, panel, k // 4, column, k % 4]) - np.int32(128)
    return np.float32(level) * weight.scales[0, panel * PANEL + column]


# weight_at(weight, panel, k, column): one weight of layer 0, as float32.
weight_at = by_type({Float32Weight: _float32_at, BFloat16Weight: _bfloat16_at, Int8Weight: _int8_at})
