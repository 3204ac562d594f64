"""Token and position embeddings of the new tokens."""

import numpy as np
from numba.extending import overload

from tinygpt.kernels.cpu.jit import kernel
from tinygpt.kernels.cpu.layers.formats import BFloat16Weight, Float32Weight, Int8Weight, is_a
from tinygpt.kernels.cpu.layers.operands import from_bfloat16
from tinygpt.kernels.cpu.runtime.team import claim, complete, finish_phase
from tinygpt.kernels.cpu.simd.tiles import PANEL

ROWS_PER_ITEM = 4


@kernel
def embed(team, x, token_ids, embeds, positions, wte, wte_factors, wpe):
    """x (N, C) = wte[token] * wte_factors + wpe[position]; embeds (N, C) stand for tokens below 0. A phase.

    wte is a weight of one layer, which a tied head shares: token t is column t % PANEL of panel t // PANEL.
    """
    items = max((token_ids.size + ROWS_PER_ITEM - 1) // ROWS_PER_ITEM, 1)
    item = claim(team, items)
    while item >= 0:
        for n in range(item * ROWS_PER_ITEM, min((item + 1) * ROWS_PER_ITEM, token_ids.size)):
            if token_ids[n] < 0:
                for c in range(x.shape[1]):
                    x[n, c] = embeds[n, c] + wpe[positions[n], c]
                continue
            panel, column = token_ids[n] // PANEL, token_ids[n] % PANEL
            for c in range(x.shape[1]):
                x[n, c] = weight_at(wte, panel, c, column) * wte_factors[c] + wpe[positions[n], c]
        complete(team, items)
        item = claim(team, items)
    finish_phase(team)


def weight_at(weight, panel, k, column):
    """One weight of layer 0, as float32."""
    raise NotImplementedError


@overload(weight_at, inline="always")
def _weight_at(weight, panel, k, column):
    if is_a(weight, Float32Weight):
        return lambda weight, panel, k, column: weight.panels[0, panel, k, column]
    if is_a(weight, BFloat16Weight):
        return lambda weight, panel, k, column: from_bfloat16(weight.panels[0, panel, k // 2, column, k % 2])
    if is_a(weight, Int8Weight):
        return _int8_at
    return None


def _int8_at(weight, panel, k, column):
    level = np.int32(weight.panels[0, panel, k // 4, column, k % 4]) - np.int32(128)
    return np.float32(level) * weight.scales[0, panel * PANEL + column]
