"""Keeping what a step computes on its way, for a look inside."""

from tinygpt.kernels.cpu.jit import kernel
from tinygpt.kernels.cpu.runtime.team import claim_rows, complete_rows, finish_phase
from tinygpt.kernels.cpu.simd.vector_ir import address, float32_at


@kernel
def keep_rows(team, kept, layer, rows):
    """kept[layer] (N, C) = the first C columns of rows (N, C or more). A phase, unless nothing is to be kept."""
    if kept.size == 0:
        return
    columns = kept.shape[2]
    first, last = claim_rows(team, rows.shape[0])
    while first >= 0:
        for n in range(first, last):
            source = float32_at(address(rows) + n * rows.shape[1] * 4, columns)
            target = float32_at(address(kept) + (layer * kept.shape[1] + n) * columns * 4, columns)
            for c in range(columns):
                target[c] = source[c]
        complete_rows(team, rows.shape[0])
        first, last = claim_rows(team, rows.shape[0])
    finish_phase(team)
