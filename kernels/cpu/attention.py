"""Causal attention over the KV cache, the same code for prefill and decode.

Keys lie in blocks of KEY_BLOCK absolute positions. A query meets the blocks in order and keeps a running maximum,
sum and weighted value (online softmax: Milakov and Gimelshein, 2018; FlashAttention: Dao et al., 2022). What a
query computes therefore depends on its position alone: not on which queries share its tile, nor on how the prompt
was cut into steps.

The cache is laid out as the tiles read it: keys transposed in a block, (..., T / KEY_BLOCK, D, KEY_BLOCK), values by
position, (..., T, D rounded up to LANES). It holds float32, or bfloat16 as uint16; the arithmetic is float32.
"""

import numpy as np
from numba import types
from numba.extending import overload

from tinygpt.kernels.cpu.activations import ONE, ZERO, exp
from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.operands import to_bfloat16
from tinygpt.kernels.cpu.team import claim, complete, finish_phase
from tinygpt.kernels.cpu.tiles import TILE_ROWS, wide_tile, wide_tile_f32b
from tinygpt.kernels.cpu.vector_ir import LANES, address, float32_at, max_lanes, sum_lanes

KEY_BLOCK = 64


def padded_head(head_size: int) -> int:
    return -(-head_size // LANES) * LANES


def scratch_size(head_size: int) -> int:
    """float32 values that one thread needs: scores, a block's weighted values and their running sum."""
    return TILE_ROWS * (KEY_BLOCK + 2 * padded_head(head_size) + 2)


@jit
def write_kv(team, k_cache, v_cache, qkv, positions, token_rows):
    """Put the new tokens' keys and values in their place. A phase; an item is a head.

    k_cache (S, H, T / KEY_BLOCK, D, KEY_BLOCK), v_cache (S, H, T, padded D), qkv (N, 3C), positions and
    token_rows (N,).
    """
    heads, size = k_cache.shape[1], k_cache.shape[3]
    head = claim(team, heads)
    while head >= 0:
        k_start, v_start = (heads + head) * size, (2 * heads + head) * size
        for n in range(positions.size):
            row, block, column = token_rows[n], positions[n] // KEY_BLOCK, positions[n] % KEY_BLOCK
            for d in range(size):
                k_cache[row, head, block, d, column] = encode(k_cache, qkv[n, k_start + d])
            for d in range(size):
                v_cache[row, head, positions[n], d] = encode(v_cache, qkv[n, v_start + d])
        complete(team, heads)
        head = claim(team, heads)
    finish_phase(team)


@jit
def attend(team, out, qkv, k_cache, v_cache, positions, token_rows, tiles, scale):
    """out (N, C) = softmax(scale q·k) v, each new token over its sequence up to its own position.

    A phase; an item is a tile of queries and a head. tiles (tiles + 1,): the first token of each tile, all of one
    sequence, the last bound being N. Needs scratch_size values of the thread's scratch.
    """
    count = tiles.size - 1
    items = max(k_cache.shape[1] * count, 1)
    item = claim(team, items)
    while item >= 0:
        head, tile = item // count, item % count
        first, last = tiles[tile], tiles[tile + 1]
        _attend_tile(first, last, token_rows[first], head, out, qkv, k_cache, v_cache, positions, scale, team.scratch)
        complete(team, items)
        item = claim(team, items)
    finish_phase(team)


@jit
def _attend_tile(first, last, row, head, out, qkv, k_cache, v_cache, positions, scale, scratch):
    """Up to TILE_ROWS queries of one sequence and head. Works on addresses, see vector_ir._make_view."""
    rows, size, padded = last - first, k_cache.shape[3], v_cache.shape[3]
    scores = address(scratch)  # (TILE_ROWS, KEY_BLOCK)
    values = scores + TILE_ROWS * KEY_BLOCK * 4  # (TILE_ROWS, padded), of one block
    totals = values + TILE_ROWS * padded * 4  # (TILE_ROWS, padded), so far
    highest = float32_at(totals + TILE_ROWS * padded * 4, TILE_ROWS)
    weight_sum = float32_at(totals + TILE_ROWS * padded * 4 + TILE_ROWS * 4, TILE_ROWS)
    for r in range(rows):
        float32_at(totals + r * padded * 4, padded)[:] = ZERO
        highest[r], weight_sum[r] = -np.inf, ZERO

    q, ldq = address(qkv) + (first * qkv.shape[1] + head * size) * 4, qkv.shape[1] * 4
    k = address(k_cache) + row * k_cache.strides[0] + head * k_cache.strides[1]
    v = address(v_cache) + row * v_cache.strides[0] + head * v_cache.strides[1]
    newest = positions[last - 1]
    for block in range(newest // KEY_BLOCK + 1):
        keys = min(KEY_BLOCK, newest + 1 - block * KEY_BLOCK)
        cache_tile(k_cache, rows, q, ldq, k + block * k_cache.strides[2], size, scores, KEY_BLOCK)
        for r in range(rows):
            visible = min(KEY_BLOCK, positions[first + r] + 1 - block * KEY_BLOCK)
            row_scores = float32_at(scores + r * KEY_BLOCK * 4, KEY_BLOCK)
            total = float32_at(totals + r * padded * 4, padded)
            _softmax_step(row_scores, visible, scale, r, highest, weight_sum, total)
        # Keys past `keys` are nobody's yet. Keys a row may not see have weight 0 and add exactly nothing.
        v_block = v + block * KEY_BLOCK * v_cache.strides[2]
        cache_tile(v_cache, rows, scores, KEY_BLOCK * 4, v_block, keys, values, padded)
        for r in range(rows):
            value, total = float32_at(values + r * padded * 4, padded), float32_at(totals + r * padded * 4, padded)
            for d in range(padded):
                total[d] += value[d]

    for r in range(rows):
        share = ONE / weight_sum[r]
        total = float32_at(totals + r * padded * 4, size)
        target = float32_at(address(out) + ((first + r) * out.shape[1] + head * size) * 4, size)
        for d in range(size):
            target[d] = total[d] * share


@jit
def _softmax_step(scores, visible, scale, r, highest, weight_sum, total):
    """Turn a block's scores (KEY_BLOCK,) into weights relative to the maximum so far, and rescale what came before."""
    for j in range(visible):
        scores[j] *= scale
    for j in range(max(visible, 0), KEY_BLOCK):
        scores[j] = -np.inf
    new = max(highest[r], max_lanes(address(scores), KEY_BLOCK // LANES))
    for j in range(KEY_BLOCK):
        scores[j] = exp(scores[j] - new)
    if new > highest[r]:
        shrink = exp(highest[r] - new)
        weight_sum[r] *= shrink
        for d in range(total.size):
            total[d] *= shrink
        highest[r] = new
    weight_sum[r] += sum_lanes(address(scores), KEY_BLOCK // LANES)


def cache_tile(cache, rows, a, lda, b, steps, c, columns):
    """C (rows, columns) = A (rows, steps) @ B (steps, columns), B at an address in the cache, lda in bytes."""
    raise NotImplementedError


@overload(cache_tile)
def _cache_tile(cache, rows, a, lda, b, steps, c, columns):
    if cache.dtype == types.float32:
        return _cache_tile_float32
    return _cache_tile_bfloat16


def _cache_tile_float32(cache, rows, a, lda, b, steps, c, columns):
    wide_tile(rows, a, lda, b, columns * 4, steps, c, columns * 4, columns)


def _cache_tile_bfloat16(cache, rows, a, lda, b, steps, c, columns):
    wide_tile_f32b(rows, a, lda, b, columns * 2, steps, c, columns * 4, columns)


def encode(cache, x):
    """A float32 value as the cache holds it."""
    raise NotImplementedError


@overload(encode, inline="always")
def _encode(cache, x):
    if cache.dtype == types.float32:
        return lambda cache, x: x
    return lambda cache, x: to_bfloat16(x)
