"""Experts: each token's most probable ones, pairs of a token and an expert sorted by expert, and their weighted sum.

N tokens, k experts a token, P = N k pairs, E experts, C n_embd.
"""

import functools
import math

from numba import cuda, float32, int32

from ..draw import index_of, key_of, rank_of
from ..jit import (
    WARP,
    kernel,
    lane_and_warp,
    let_next_kernel_begin,
    wait_for_kernel_before,
    warp_greatest,
    warp_sum,
)
from .linear import ROWS, TILE_BOUNDS

CHOOSE_WARPS = 4
SORT_THREADS = 256
ADD_THREADS = 256


def max_tiles(pairs: int, num_experts: int, tile_rows: int = ROWS) -> int:
    return min(pairs, pairs // tile_rows + num_experts)


@functools.cache
def choose_kernel(sums_to_one: bool):
    """Write each token's k most probable experts and their shares, ties to the first. scores (N, E) end as -inf there.

    A warp a token. Grid: N / CHOOSE_WARPS.
    """

    def choose(chosen, shares, scores, num_experts, per_token, sizes):
        let_next_kernel_begin()
        (lane, warp) = lane_and_warp()
        n = cuda.blockIdx.x * CHOOSE_WARPS + warp
        if n >= sizes[0]:
            return
        wait_for_kernel_before()
        row = n * num_experts
        highest = float32(0)
        all_of_them = float32(0)
        all_chosen = float32(0)
        for j in range(per_token):
            best = 0
            for e in range(lane, num_experts, WARP):
                best = max(best, rank_of(key_of(scores[row + e]), e))
            expert = index_of(warp_greatest(best))
            score = scores[row + expert]
            if j == 0:
                highest = score
                for e in range(lane, num_experts, WARP):
                    all_of_them += math.exp(scores[row + e] - highest)
                all_of_them = warp_sum(all_of_them)
            share = math.exp(score - highest) / all_of_them
            all_chosen += share
            cuda.syncwarp()
            if lane == 0:
                chosen[n * per_token + j] = expert
                shares[n * per_token + j] = share
                scores[row + expert] = float32(-math.inf)
            cuda.syncwarp()
        if sums_to_one and lane == 0:
            for j in range(per_token):
                shares[n * per_token + j] /= all_chosen

    return kernel(choose)


@kernel
def sort_pairs(chosen, counts, order, places, tiles, num_experts, per_token, tile_rows, num_tiles, sizes):
    """Sort pairs by expert, and cut each expert's into tiles. One block.

    counts (E,): the experts' pairs. order (P,): tokens. places (N, k): pairs. tiles: some may be empty.
    """
    let_next_kernel_begin()
    wait_for_kernel_before()
    thread = cuda.threadIdx.x
    num_pairs = sizes[0] * per_token
    for i in range(thread, num_tiles * TILE_BOUNDS, SORT_THREADS):
        tiles[i] = 0
    for e in range(thread, num_experts, int32(SORT_THREADS)):
        count = 0
        for p in range(num_pairs):
            count += chosen[p] == e
        counts[e] = count
    cuda.syncthreads()
    for e in range(thread, num_experts, int32(SORT_THREADS)):
        pair = 0
        at = 0
        for before in range(e):
            pair += counts[before]
            at += (counts[before] + tile_rows - 1) // tile_rows * TILE_BOUNDS
        stop = int32(pair + counts[e])
        for first in range(pair, stop, tile_rows):
            tiles[at] = e
            tiles[at + 1] = first
            tiles[at + 2] = min(int32(first + tile_rows), stop)
            at += TILE_BOUNDS
        for p in range(num_pairs):
            if chosen[p] == e:
                order[pair] = p // per_token
                places[p] = pair
                pair += 1


@kernel
def add_experts(x, outputs, width, shares, places, per_token, columns, sizes):
    """x (N, C) += each token's experts, outputs (P, width), by their shares, the most probable first. Grid: N."""
    let_next_kernel_begin()
    n = cuda.blockIdx.x
    if n >= sizes[0]:
        return
    wait_for_kernel_before()
    for c in range(cuda.threadIdx.x, columns, int32(ADD_THREADS)):
        total = float32(0)
        for j in range(n * per_token, (n + 1) * per_token):
            total = cuda.fma(shares[j], outputs[places[j] * width + c], total)
        x[n * columns + c] += total
