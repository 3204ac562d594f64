"""Causal attention over the KV cache, the same code for prefill and decode.

A query meets blocks of KEY_BLOCK absolute positions in order, with a running maximum and sum (online softmax: Milakov
and Gimelshein, 2018; FlashAttention: Dao et al., 2022): its result depends on its position alone.

A step of a column is 4 bytes, P values: 1 float32, 2 bfloat16 (uint16), or 4 int8. Keys are transposed in a block,
(..., D / P, KEY_BLOCK, P); values are (..., KEY_BLOCK / P, D rounded up to LANES, P).
"""

import numpy as np
from numba import types

from ..jit import inline, kernel, overload_by_dtype
from ..simd.targets import TARGET
from ..simd.tiles import LINE_BYTES, OUT_TILE, ROW_TILE, STEP_BYTES, panel_add, panel_tile, strip_add
from ..simd.vector_ir import (
    LANES,
    VECTOR_BYTES,
    address,
    float32_at,
    fma,
    max_lanes,
    sum_lanes,
    uint16_at,
    uint32_at,
)
from ..team import claim, complete, finish_phase
from . import int8_cache
from .activations import ONE, ZERO, exp
from .operands import rounded_to_bfloat16, to_bfloat16

KEY_BLOCK = OUT_TILE  # a block of keys is a tile's panel
KEY_STEP_BYTES = KEY_BLOCK * STEP_BYTES
SCORE_BYTES = KEY_BLOCK * 4  # of a query's float32 scores of a block
NEAR_BLOCKS = 4  # of a head: 4 to 128 KB
# A head of one query takes 1 us, and a claim 0.2: an item has several heads if this many items remain.
ENOUGH_ITEMS = 32


def padded_head(head_size: int) -> int:
    return -(-head_size // LANES) * LANES


def scratch_size(head_size: int) -> int:
    return (
        ROW_TILE * (int8_cache.LEAST_QUERY + head_size + 2 * KEY_BLOCK + padded_head(head_size)) + 3 * LANES
    )


@kernel
def write_kv(team, k_cache, v_cache, qkv, positions, token_slots, tiles):
    """Write keys and values of sequences with several tiles. A phase; an item is a head. `attend` writes others.

    k_cache (S, H, T / KEY_BLOCK, D / P, KEY_BLOCK, P), v_cache (S, H, T / KEY_BLOCK, KEY_BLOCK / P, padded D, P).
    """
    heads = k_cache.shape[1]
    head = claim(team, heads)
    while head >= 0:
        for tile in range(tiles.size - 1):
            if not _has_sequence(tile, tiles, token_slots):
                _write_tile(tiles[tile], tiles[tile + 1], head, k_cache, v_cache, qkv, positions, token_slots)
        complete(team, heads)
        head = claim(team, heads)
    finish_phase(team)


@kernel
def _has_sequence(tile, tiles, token_slots):
    first, last = tiles[tile], tiles[tile + 1]
    slot = token_slots[first]
    return (first == 0 or token_slots[first - 1] != slot) and (
        last == token_slots.size or token_slots[last] != slot
    )


@kernel
def _write_tile(first, last, head, k_cache, v_cache, qkv, positions, token_slots):
    for n in range(first, last):
        write_token(n, head, k_cache, v_cache, qkv, positions[n], token_slots[n])


@kernel
def write_token(n, head, k_cache, v_cache, qkv, position, slot):
    heads = k_cache.shape[1]
    size = qkv.shape[1] // (3 * heads)
    key = address(qkv) + (n * qkv.shape[1] + (heads + head) * size) * 4
    block = position // KEY_BLOCK
    place = position % KEY_BLOCK
    keys = _block(k_cache, slot, head, block)
    values = _block(v_cache, slot, head, block)
    value = float32_at(key + heads * size * 4, size)
    column = keys + place * STEP_BYTES
    put_key(k_cache, column, float32_at(key, size))
    put_value(v_cache, values, place, value, column)


@kernel
def _block(cache, slot, head, block):
    return address(cache) + slot * cache.strides[0] + head * cache.strides[1] + block * cache.strides[2]


@kernel
def attend(team, out, qkv, k_cache, v_cache, positions, token_slots, tiles, scale, alibi):
    """Compute out (N, C) = softmax(scale q·k) v of qkv (N, 3C). A phase; an item is a tile and a few heads.

    tiles (tiles + 1,): each tile's first token, and N. alibi: an Alibi or None. Needs scratch_size values of scratch.
    """
    heads = k_cache.shape[1]
    count = tiles.size - 1
    scratch = team.scratch
    share = max(min(ROW_TILE * count // max(positions.size, 1), heads * count // ENOUGH_ITEMS), 1)
    items = max((heads + share - 1) // share * count, 1)
    item = claim(team, items)
    while item >= 0:
        head, tile = item // count * share, item % count
        first, last = tiles[tile], tiles[tile + 1]
        slot = token_slots[first]
        stop = min(head + share, heads)
        following = _block(k_cache, token_slots[tiles[(item + 1) % count]], (item + 1) // count * share, 0)
        for h in range(head, stop):
            if _has_sequence(tile, tiles, token_slots):
                _write_tile(first, last, h, k_cache, v_cache, qkv, positions, token_slots)
            after = _block(k_cache, slot, h + 1, 0) if h + 1 < stop else following
            _attend_tile(
                first, last, slot, h, out, qkv, k_cache, v_cache, positions, scale, alibi, after, scratch
            )
        complete(team, items)
        item = claim(team, items)
    finish_phase(team)


@inline
def _attend_tile(
    first, last, slot, head, out, qkv, k_cache, v_cache, positions, scale, alibi, after, scratch
):
    rows = last - first
    steps = steps_of_key(k_cache)
    columns = v_cache.shape[4]
    size = qkv.shape[1] // (3 * k_cache.shape[1])
    q = address(scratch)
    q_bytes = bytes_of_query(k_cache)  # (ROW_TILE,) of them
    scores = q + ROW_TILE * q_bytes  # (ROW_TILE, KEY_BLOCK)
    weights = place_of_weights(v_cache, scores)  # (ROW_TILE, KEY_BLOCK)
    totals = scores + 2 * ROW_TILE * SCORE_BYTES  # (ROW_TILE, columns)
    after_totals = totals + ROW_TILE * columns * 4
    highest = float32_at(after_totals, LANES)
    weight_sum = float32_at(after_totals + VECTOR_BYTES, LANES)
    factors = float32_at(after_totals + 2 * VECTOR_BYTES, LANES)
    highest[:], weight_sum[:] = -np.inf, ZERO
    for r in range(rows):
        query = float32_at(address(qkv) + ((first + r) * qkv.shape[1] + head * size) * 4, size)
        put_query(k_cache, q + r * q_bytes, query, scale)
        float32_at(totals + r * columns * 4, columns)[:] = ZERO

    newest = positions[last - 1]
    stride = k_cache.strides[2]
    blocks = newest // KEY_BLOCK + 1
    for block in range(blocks):
        first_key = block * KEY_BLOCK
        keys = _block(k_cache, slot, head, block)
        values = _block(v_cache, slot, head, block)
        visible = min(KEY_BLOCK, newest + 1 - first_key)
        ahead = (
            after + block * stride
            if blocks <= NEAR_BLOCKS
            else keys + stride
            if block + 1 < blocks
            else after
        )
        where = keys, KEY_STEP_BYTES, steps, scores, SCORE_BYTES, ahead, LINE_BYTES
        panel_tile(k_cache, rows, (visible + LANES - 1) // LANES, q, q_bytes, *where)
        for r in range(rows):
            row_scores = float32_at(scores + r * SCORE_BYTES, KEY_BLOCK)
            position = positions[first + r]
            add_distances(alibi, row_scores, head, first_key - position)
            factors[r], highest[r] = highest[r], _highest_of(row_scores, position + 1 - first_key, highest[r])
        _lessen(weight_sum, factors, highest)
        for r in range(rows):
            row_scores = float32_at(scores + r * SCORE_BYTES, KEY_BLOCK)
            weight_sum[r] += _exp_of(row_scores, highest[r])
            _multiply(float32_at(totals + r * columns * 4, columns), factors[r])
            seen = positions[first + r] + 1 - first_key
            value_scales = keys + (steps + 1) * KEY_STEP_BYTES
            put_weights(v_cache, weights + r * SCORE_BYTES, row_scores, seen, value_scales)
        # Keys past the newest are undefined. Keys that a row may not see have weight 0.
        _add_values(v_cache, rows, weights, values, visible, totals, ahead + values - keys)

    for r in range(rows):
        share = ONE / weight_sum[r]
        total = float32_at(totals + r * columns * 4, size)
        target = float32_at(address(out) + ((first + r) * out.shape[1] + head * size) * 4, size)
        for d in range(size):
            target[d] = total[d] * share


@inline
def _highest_of(scores, visible, before):
    for j in range(max(visible, 0), KEY_BLOCK):
        scores[j] = -np.inf
    return max(before, max_lanes(address(scores), KEY_BLOCK // LANES))


@inline
def _lessen(weight_sum, highest, new):
    for r in range(LANES):
        highest[r] = exp(highest[r] - new[r])
        weight_sum[r] *= highest[r]


@inline
def _exp_of(scores, highest):
    for j in range(KEY_BLOCK):
        scores[j] = exp(scores[j] - highest)
    return sum_lanes(address(scores), KEY_BLOCK // LANES)


@inline
def _multiply(total, factor):
    for d in range(total.size):
        total[d] *= factor


@kernel
def add_distances(alibi, scores, head, distance):
    """Lessen a block's scores (KEY_BLOCK,). distance: the first key's position minus the query's."""
    if alibi is None:
        return
    slope = alibi.slopes[head]
    for j in range(KEY_BLOCK):
        scores[j] = fma(slope, np.float32(distance + j), scores[j])


@kernel
def _add_values(cache, rows, weights, values, keys, totals, following):
    columns = cache.shape[4]
    per_step = cache.shape[5]
    row_bytes = columns * STEP_BYTES
    steps = (keys + per_step - 1) // per_step
    done = 0
    while columns - done >= OUT_TILE:
        where = values + done * 4, row_bytes, steps, totals + done * 4, row_bytes, following, LINE_BYTES
        panel_add(cache, rows, weights, SCORE_BYTES, *where)
        following += steps * OUT_TILE * STEP_BYTES
        done += OUT_TILE
    while done < columns:
        where = values + done * 4, row_bytes, steps, totals + done * 4, row_bytes, following, LINE_BYTES
        strip_add(cache, rows, weights, SCORE_BYTES, *where)
        following += steps * LINE_BYTES
        done += LANES


def _put_key_float32(cache, at, x):
    column = float32_at(at, x.size * KEY_BLOCK)
    for d in range(x.size):
        column[d * KEY_BLOCK] = x[d]


def _put_key_bfloat16(cache, at, x):
    pairs = (x.size + 1) // 2
    column = uint32_at(at, pairs * KEY_BLOCK)
    for i in range(x.size // 2):
        column[i * KEY_BLOCK] = _pair(to_bfloat16(x[2 * i]), to_bfloat16(x[2 * i + 1]))
    if x.size % 2:
        column[(pairs - 1) * KEY_BLOCK] = np.uint32(to_bfloat16(x[x.size - 1]))


# put_key writes a key (D,) to its column of a block.
put_key = overload_by_dtype(
    {types.float32: _put_key_float32, types.uint16: _put_key_bfloat16, types.uint8: int8_cache.put_key}
)


def _put_value_float32(cache, start, position, x, column):
    target = float32_at(start + position * cache.strides[3], x.size)
    for d in range(x.size):
        target[d] = x[d]


def _put_value_bfloat16(cache, start, position, x, column):
    # Position 2i clears 2i + 1: 0 * NaN would be NaN.
    target = uint32_at(start + position // 2 * cache.strides[3], x.size)
    if position % 2:
        for d in range(x.size):
            target[d] = _pair(target[d], to_bfloat16(x[d]))
    else:
        for d in range(x.size):
            target[d] = np.uint32(to_bfloat16(x[d]))


# put_value writes a value (D,) to a position of the block at `start`, and its scale to its key's column.
put_value = overload_by_dtype(
    {types.float32: _put_value_float32, types.uint16: _put_value_bfloat16, types.uint8: int8_cache.put_value}
)


@kernel
def _pair(low, high):
    return np.uint32(np.uint32(low) & np.uint32(0xFFFF)) | np.uint32(np.uint32(high) << np.uint32(16))


def _put_steps_float32(cache, target, x, scale):
    values = float32_at(target, x.size)
    for i in range(x.size):
        values[i] = x[i] * scale


def _put_steps_bfloat16(cache, target, x, scale):
    values = uint16_at(target, x.size + x.size % 2)
    values[values.size - 1] = np.uint16(0)
    for i in range(x.size):
        values[i] = to_bfloat16(x[i] * scale)


def _put_steps_widened(cache, target, x, scale):
    values = float32_at(target, x.size + x.size % 2)
    values[values.size - 1] = ZERO
    for i in range(x.size):
        values[i] = rounded_to_bfloat16(x[i] * scale)


def _bytes_as_they_lie(cache):
    return cache.shape[3] * STEP_BYTES


def _bytes_of_widened(cache):
    return cache.shape[3] * 2 * STEP_BYTES


# put_query writes scale * x, of a query x (D,), as the left side of a tile.
_put_rounded, _rounded_bytes = (
    (_put_steps_bfloat16, _bytes_as_they_lie)
    if TARGET.multiplies_bfloat16
    else (_put_steps_widened, _bytes_of_widened)
)
put_query = overload_by_dtype(
    {types.float32: _put_steps_float32, types.uint16: _put_rounded, types.uint8: int8_cache.put_query}
)
bytes_of_query = overload_by_dtype(
    {types.float32: _bytes_as_they_lie, types.uint16: _rounded_bytes, types.uint8: int8_cache.bytes_of_query}
)


def _at_the_scores(cache, scores):
    return scores


def _behind_the_scores(cache, scores):
    return scores + ROW_TILE * SCORE_BYTES


# In float32, softmax weights replace the scores.
place_of_weights = overload_by_dtype({types.float32: _at_the_scores}, otherwise=_behind_the_scores)


def _leave_weights(cache, target, weights, seen, value_scales):
    pass


def _put_weights(cache, target, weights, seen, value_scales):
    put_query(cache, target, weights, ONE)


# put_weights writes a block's softmax weights (KEY_BLOCK,), the first `seen` not 0.
put_weights = overload_by_dtype(
    {types.float32: _leave_weights, types.uint8: int8_cache.put_weights}, otherwise=_put_weights
)


def _all_steps(cache):
    return cache.shape[3]


steps_of_key = overload_by_dtype({types.uint8: int8_cache.steps_of_key}, otherwise=_all_steps)
