"""Causal attention over the KV cache, the same code for prefill and decode.

A query meets blocks of KEY_BLOCK absolute positions in order, with a running maximum and sum (online softmax: Milakov
and Gimelshein, 2018; FlashAttention: Dao et al., 2022): its result depends on its position alone. In a layer with a
window, the first block has the query's first visible position; of a tile's queries, a block before it changes nothing.
"""

from typing import NamedTuple

import numpy as np

from ..jit import inline, kernel
from ..simd.tiles import LINE_BYTES, OUT_TILE, ROW_TILE, STEP_BYTES, panel_add, panel_tile, strip_add
from ..simd.vector_ir import (
    LANES,
    VECTOR_BYTES,
    address,
    float32_at,
    fma,
    max_lanes,
    sum_lanes,
)
from ..team import claim, complete, finish_phase
from .activations import ONE, ZERO, exp
from .cache_dtypes import (
    KEY_BLOCK,
    KEY_STEP_BYTES,
    LEAST_QUERY,
    SCORE_BYTES,
    bytes_of_query,
    padded_head,
    place_of_weights,
    put_key,
    put_query,
    put_value,
    put_weights,
    steps_of_key,
)

NEAR_BLOCKS = 4  # of a head: 4 to 128 KB
# A head of one query takes 1 us, and a claim 0.2: an item has several heads if this many items remain.
ENOUGH_ITEMS = 32
# The greatest score of no key: finite, so that exp(a hidden key's -inf - it) is 0, not NaN.
LEAST_SCORE = np.finfo(np.float32).min


def scratch_size(head_size: int) -> int:
    return ROW_TILE * (LEAST_QUERY + head_size + 2 * KEY_BLOCK + padded_head(head_size)) + 3 * LANES


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
def attend(team, out, qkv, k_cache, v_cache, positions, token_slots, tiles, scale, distances):
    """Compute out (N, C) = softmax(scale q·k) v of qkv (N, 3C). A phase; an item is a tile and a few heads.

    tiles (tiles + 1,): each tile's first token, and N. distances: LayerDistances or None. Needs scratch_size values of
    scratch.
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
                first, last, slot, h, out, qkv, k_cache, v_cache, positions, scale, distances, after, scratch
            )
        complete(team, items)
        item = claim(team, items)
    finish_phase(team)


class Room(NamedTuple):
    """The scratch of a tile's queries: addresses, and values of each query."""

    q: int  # (ROW_TILE, q_bytes)
    q_bytes: int
    scores: int  # (ROW_TILE, KEY_BLOCK) float32
    weights: int  # (ROW_TILE, KEY_BLOCK)
    totals: int  # (ROW_TILE, columns) float32
    highest: np.ndarray  # (LANES,) float32: the greatest score
    weight_sum: np.ndarray  # (LANES,) float32
    factors: np.ndarray  # (LANES,) float32: of what is summed before a block


@inline
def room_in(scratch, k_cache, v_cache):
    q = address(scratch)
    q_bytes = bytes_of_query(k_cache)
    scores = q + ROW_TILE * q_bytes
    weights = place_of_weights(v_cache, scores)
    totals = scores + 2 * ROW_TILE * SCORE_BYTES
    after_totals = totals + ROW_TILE * v_cache.shape[4] * 4
    highest = float32_at(after_totals, LANES)
    weight_sum = float32_at(after_totals + VECTOR_BYTES, LANES)
    factors = float32_at(after_totals + 2 * VECTOR_BYTES, LANES)
    return Room(q, q_bytes, scores, weights, totals, highest, weight_sum, factors)


@inline
def _attend_tile(
    first, last, slot, head, out, qkv, k_cache, v_cache, positions, scale, distances, after, scratch
):
    rows = last - first
    steps = steps_of_key(k_cache)
    columns = v_cache.shape[4]
    size = qkv.shape[1] // (3 * k_cache.shape[1])
    # Unpacked: a tuple in use all the while gives a tenth more instructions.
    q, q_bytes, scores, weights, totals, highest, weight_sum, factors = room_in(scratch, k_cache, v_cache)
    highest[:], weight_sum[:] = least_score(distances), ZERO
    for r in range(rows):
        query = float32_at(address(qkv) + ((first + r) * qkv.shape[1] + head * size) * 4, size)
        put_query(k_cache, q + r * q_bytes, query, scale)
        float32_at(totals + r * columns * 4, columns)[:] = ZERO

    newest = positions[last - 1]
    blocks = newest // KEY_BLOCK + 1
    for block in range(first_block(distances, positions[first]), blocks):
        first_key = block * KEY_BLOCK
        keys = _block(k_cache, slot, head, block)
        values = _block(v_cache, slot, head, block)
        visible = min(KEY_BLOCK, newest + 1 - first_key)
        ahead = _block_ahead(keys, after, block, blocks, k_cache.strides[2])
        where = keys, KEY_STEP_BYTES, steps, scores, SCORE_BYTES, ahead, LINE_BYTES
        panel_tile(k_cache, rows, (visible + LANES - 1) // LANES, q, q_bytes, *where)
        for r in range(rows):
            row_scores = float32_at(scores + r * SCORE_BYTES, KEY_BLOCK)
            distance = first_key - positions[first + r]
            add_distances(distances, row_scores, head, distance)
            factors[r] = highest[r]
            highest[r] = _highest_of(row_scores, 1 - distance, highest[r])
        _lessen(weight_sum, factors, highest)
        for r in range(rows):
            row_scores = float32_at(scores + r * SCORE_BYTES, KEY_BLOCK)
            weight_sum[r] += _exp_of(row_scores, highest[r])
            rescale(float32_at(totals + r * columns * 4, columns), factors[r])
            seen = positions[first + r] + 1 - first_key
            value_scales = keys + (steps + 1) * KEY_STEP_BYTES
            put_weights(v_cache, weights + r * SCORE_BYTES, row_scores, seen, value_scales)
        # Keys past the newest are undefined. Keys that a row may not see have weight 0.
        add_values(v_cache, rows, weights, values, visible, totals, ahead + values - keys)

    for r in range(rows):
        total = float32_at(totals + r * columns * 4, size)
        target = float32_at(address(out) + ((first + r) * out.shape[1] + head * size) * 4, size)
        _normalize(target, total, weight_sum[r])


@inline
def _block_ahead(keys, after, block, blocks, stride):
    """Return the block of keys that is prefetched next to a block: of the next head if this head's are near."""
    if blocks <= NEAR_BLOCKS:
        ahead = after + block * stride
    elif block + 1 < blocks:
        ahead = keys + stride
    else:
        ahead = after
    return ahead


@inline
def _normalize(target, total, weight_sum):
    share = ONE / weight_sum
    for d in range(target.size):
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
def rescale(total, factor):
    for d in range(total.size):
        total[d] *= factor


class LayerDistances(NamedTuple):
    slopes: np.ndarray  # (H,) float32
    window: int


@kernel
def distances_of(distances, layer):
    if distances is None:
        return None
    return LayerDistances(distances.slopes, distances.windows[layer])


@kernel
def least_score(distances):
    if distances is None:
        return -np.inf
    return LEAST_SCORE


@kernel
def first_block(distances, position):
    if distances is None:
        return 0
    return max(position + 1 - distances.window, 0) // KEY_BLOCK


@kernel
def add_distances(distances, scores, head, distance):
    """Lessen or hide a block's scores (KEY_BLOCK,). distance: the first key's position minus the query's."""
    if distances is None:
        return
    slope = distances.slopes[head]
    for j in range(KEY_BLOCK):
        scores[j] = fma(slope, np.float32(distance + j), scores[j])
    for j in range(min(max(1 - distance - distances.window, 0), KEY_BLOCK)):
        scores[j] = -np.inf


@kernel
def add_values(cache, rows, weights, values, keys, totals, following):
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
