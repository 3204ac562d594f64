"""Token and position embeddings of the new tokens."""

from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.team import claim, complete, finish_phase
from tinygpt.kernels.cpu.tiles import PANEL

ROWS_PER_ITEM = 4


@jit
def embed(team, x, token_ids, positions, wte, wpe):
    """x (N, C) = wte[token] + wpe[position]. A phase. wte lies in panels (P, C, PANEL), which the tied head shares."""
    items = max((token_ids.size + ROWS_PER_ITEM - 1) // ROWS_PER_ITEM, 1)
    item = claim(team, items)
    while item >= 0:
        for n in range(item * ROWS_PER_ITEM, min((item + 1) * ROWS_PER_ITEM, token_ids.size)):
            panel, column = token_ids[n] // PANEL, token_ids[n] % PANEL
            for c in range(x.shape[1]):
                x[n, c] = wte[panel, c, column] + wpe[positions[n], c]
        complete(team, items)
        item = claim(team, items)
    finish_phase(team)
