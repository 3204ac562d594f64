"""Keeping what a step computes on its way, for a look inside."""

import numpy as np

from tinygpt.kernels.cpu.jit import kernel
from tinygpt.kernels.cpu.runtime.team import claim, complete, finish_phase
from tinygpt.kernels.cpu.simd.vector_ir import address, float32_at

ROWS_PER_ITEM = 4


@kernel
def keep_rows(team, kept, layer, rows):
    """kept[layer] (N, C) = the first C columns of rows (N, C or more). A phase, unless nothing is to be kept."""
    if kept.size == 0:
        return
    columns = kept.shape[2]
    items = max((rows.shape[0] + ROWS_PER_ITEM - 1) // ROWS_PER_ITEM, 1)
    item = claim(team, items)
    while item >= 0:
        for n in range(item * ROWS_PER_ITEM, min((item + 1) * ROWS_PER_ITEM, rows.shape[0])):
            source = float32_at(address(rows) + n * rows.shape[1] * 4, columns)
            target = float32_at(address(kept) + (layer * kept.shape[1] + n) * columns * 4, columns)
            for c in range(columns):
                target[c] = source[c]
        complete(team, items)
        item = claim(team, items)
    finish_phase(team)


def nothing_kept() -> np.ndarray:
    """What a step that is not looked into keeps."""
    return np.empty((0, 0, 0), np.float32)
