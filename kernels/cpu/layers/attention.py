"""Causal attention over the KV cache, the same code for prefill and decode.

Keys lie in blocks of KEY_BLOCK absolute positions. A query meets the blocks in order and keeps a running maximum,
sum and weighted value (online softmax: Milakov and Gimelshein, 2018; FlashAttention: Dao et al., 2022). What a
query computes therefore depends on its position alone: not on which queries share its tile, nor on how the prompt
was cut into steps.

The cache is laid out as the tiles read it, in steps of P values: 1 float32, or 2 bfloat16 (as uint16), multiplied and
added in float32, or 4 int8, see int8_cache.py. Keys are transposed in a block, (..., T / KEY_BLOCK, D / P, KEY_BLOCK,
P), and a step is P dimensions; values are (..., T / KEY_BLOCK, KEY_BLOCK / P, D rounded up to LANES, P), and a step
is P positions. Queries and softmax weights are rounded as the cache is. Whatever P, a step of a column is 4 bytes.
"""

import numpy as np
from numba import types

from tinygpt.kernels.cpu.jit import inline, kernel
from tinygpt.kernels.cpu.layers import int8_cache
from tinygpt.kernels.cpu.layers.activations import ONE, ZERO, exp
from tinygpt.kernels.cpu.layers.formats import Alibi
from tinygpt.kernels.cpu.layers.operands import rounded_to_bfloat16, to_bfloat16
from tinygpt.kernels.cpu.runtime.by_type import by_type
from tinygpt.kernels.cpu.runtime.team import claim, complete, finish_phase
from tinygpt.kernels.cpu.simd.targets import TARGET
from tinygpt.kernels.cpu.simd.tiles import (
    LINE_BYTES,
    PANEL,
    STEP_BYTES,
    TILE_ROWS,
    panel_add,
    panel_tile,
    strip_add,
)
from tinygpt.kernels.cpu.simd.vector_ir import (
    LANES,
    VECTOR_BYTES,
    address,
    expect_write,
    float32_at,
    fma,
    max_lanes,
    sum_lanes,
    uint16_at,
    uint32_at,
)

KEY_BLOCK = PANEL  # a block of keys is a tile's panel
KEY_STEP_BYTES = KEY_BLOCK * STEP_BYTES
SCORE_BYTES = KEY_BLOCK * 4  # of a query's float32 scores of a block
NEAR_BLOCKS = 4  # of a head: 4 to 128 KB
# With one query a head's tile takes less than a microsecond, and claiming one 0.2: items of several heads, as long as
# there are this many items to share out.
ENOUGH_ITEMS = 32


def padded_head(head_size: int) -> int:
    return -(-head_size // LANES) * LANES


def scratch_size(head_size: int) -> int:
    """float32 values that one thread needs: queries, scores, weights, the running weighted sum, its maximum and sum."""
    return TILE_ROWS * (int8_cache.LEAST_QUERY + head_size + 2 * KEY_BLOCK + padded_head(head_size)) + 3 * LANES


@kernel
def write_kv(team, k_cache, v_cache, qkv, positions, token_slots, tiles):
    """Put the new tokens' keys and values in their place, of sequences that have several tiles. A phase; an item is a
    head. Where a tile has all of its sequence's new tokens, `attend` does so: nobody else reads them in this step.

    k_cache (S, H, T / KEY_BLOCK, D / P, KEY_BLOCK, P), or two steps more of int8, v_cache (S, H, T / KEY_BLOCK,
    KEY_BLOCK / P, padded D, P), qkv (N, 3C), positions and token_slots (N,), tiles as `attend` takes them.
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
    """Whether a tile has all new tokens of its sequence."""
    first, last = tiles[tile], tiles[tile + 1]
    slot = token_slots[first]
    return (first == 0 or token_slots[first - 1] != slot) and (last == token_slots.size or token_slots[last] != slot)


@kernel
def _write_tile(first, last, head, k_cache, v_cache, qkv, positions, token_slots):
    for n in range(first, last):
        if n + 1 < last:  # a key is a line for each step: have the next one's fetched meanwhile
            following = _column(k_cache, token_slots[n + 1], head, positions[n + 1])
            for step in range(k_cache.shape[3]):
                expect_write(following + step * KEY_STEP_BYTES)
        write_token(n, head, k_cache, v_cache, qkv, positions[n], token_slots[n])


@kernel
def write_token(n, head, k_cache, v_cache, qkv, position, slot):
    """Put the key and value of token n and a head into their place."""
    heads = k_cache.shape[1]
    size = qkv.shape[1] // (3 * heads)
    key = address(qkv) + (n * qkv.shape[1] + (heads + head) * size) * 4
    value, column = float32_at(key + heads * size * 4, size), _column(k_cache, slot, head, position)
    put_key(k_cache, column, float32_at(key, size))
    values = _block(v_cache, slot, head, position // KEY_BLOCK)
    put_value(v_cache, values, position % KEY_BLOCK, value, column)


@kernel
def _column(k_cache, slot, head, position):
    """Where a position's key begins: its column of a block."""
    return _block(k_cache, slot, head, position // KEY_BLOCK) + position % KEY_BLOCK * STEP_BYTES


@kernel
def _block(cache, slot, head, block):
    """Where a block of a head's keys, or values, begins."""
    return address(cache) + slot * cache.strides[0] + head * cache.strides[1] + block * cache.strides[2]


@kernel
def attend(team, out, qkv, k_cache, v_cache, positions, token_slots, tiles, scale, alibi):
    """out (N, C) = softmax(scale q·k) v, each new token over its sequence up to its own position.

    After write_kv: first it writes the keys and values that were left to it. A phase; an item is a tile of queries
    and a few heads. tiles (tiles + 1,): the first token of each tile, all of one sequence, the last bound being N.
    alibi: an Alibi of formats.py, by which scores lessen with the distance, or Nothing. Needs scratch_size values
    of the thread's scratch.
    """
    heads, count, scratch = k_cache.shape[1], tiles.size - 1, team.scratch
    share = max(min(TILE_ROWS * count // max(positions.size, 1), heads * count // ENOUGH_ITEMS), 1)
    items = max((heads + share - 1) // share * count, 1)
    item = claim(team, items)
    while item >= 0:
        head, tile = item // count * share, item % count
        first, last = tiles[tile], tiles[tile + 1]
        slot, stop = token_slots[first], min(head + share, heads)
        following = _block(k_cache, token_slots[tiles[(item + 1) % count]], (item + 1) // count * share, 0)
        for h in range(head, stop):
            if _has_sequence(tile, tiles, token_slots):
                _write_tile(first, last, h, k_cache, v_cache, qkv, positions, token_slots)
            after = _block(k_cache, slot, h + 1, 0) if h + 1 < stop else following
            _attend_tile(first, last, slot, h, out, qkv, k_cache, v_cache, positions, scale, alibi, after, scratch)
        complete(team, items)
        item = claim(team, items)
    finish_phase(team)


@inline
def _attend_tile(first, last, slot, head, out, qkv, k_cache, v_cache, positions, scale, alibi, after, scratch):
    """Up to TILE_ROWS queries of one sequence and head. Works on addresses, see vector_ir._make_view.

    after: where the keys begin that will be read next. While a block is read, as much is asked for: of the same block
    there, or in a long sequence of this head's next block, as a whole head would be gone from the L2 cache again.
    """
    rows, steps, columns = last - first, steps_of_key(k_cache), v_cache.shape[4]
    size = qkv.shape[1] // (3 * k_cache.shape[1])
    q, q_bytes = address(scratch), bytes_of_query(k_cache)  # (TILE_ROWS,) of them
    scores = q + TILE_ROWS * q_bytes  # (TILE_ROWS, KEY_BLOCK)
    weights = place_of_weights(v_cache, scores)  # (TILE_ROWS, KEY_BLOCK)
    totals = scores + 2 * TILE_ROWS * SCORE_BYTES  # (TILE_ROWS, columns)
    after_totals = totals + TILE_ROWS * columns * 4
    highest, weight_sum = float32_at(after_totals, LANES), float32_at(after_totals + VECTOR_BYTES, LANES)
    factors = float32_at(after_totals + 2 * VECTOR_BYTES, LANES)
    highest[:], weight_sum[:] = -np.inf, ZERO
    for r in range(rows):
        query = float32_at(address(qkv) + ((first + r) * qkv.shape[1] + head * size) * 4, size)
        put_query(k_cache, q + r * q_bytes, query, scale)
        float32_at(totals + r * columns * 4, columns)[:] = ZERO

    newest, stride = positions[last - 1], k_cache.strides[2]
    blocks = newest // KEY_BLOCK + 1
    for block in range(blocks):
        first_key = block * KEY_BLOCK
        keys, values = _block(k_cache, slot, head, block), _block(v_cache, slot, head, block)
        visible = min(KEY_BLOCK, newest + 1 - first_key)
        ahead = after + block * stride if blocks <= NEAR_BLOCKS else keys + stride if block + 1 < blocks else after
        where = keys, KEY_STEP_BYTES, steps, scores, SCORE_BYTES, ahead, LINE_BYTES
        panel_tile(k_cache, rows, (visible + LANES - 1) // LANES, q, q_bytes, *where)
        for r in range(rows):
            row_scores, position = float32_at(scores + r * SCORE_BYTES, KEY_BLOCK), positions[first + r]
            add_distances(alibi, row_scores, head, first_key - position)
            factors[r], highest[r] = highest[r], _highest_of(row_scores, position + 1 - first_key, highest[r])
        _lessen(weight_sum, factors, highest)
        for r in range(rows):
            row_scores = float32_at(scores + r * SCORE_BYTES, KEY_BLOCK)
            weight_sum[r] += _exp_of(row_scores, highest[r])
            _multiply(float32_at(totals + r * columns * 4, columns), factors[r])
            seen, value_scales = positions[first + r] + 1 - first_key, keys + (steps + 1) * KEY_STEP_BYTES
            put_weights(v_cache, weights + r * SCORE_BYTES, row_scores, seen, value_scales)
        # Keys past the newest are nobody's yet. Keys a row may not see have weight 0 and add exactly nothing.
        _add_values(v_cache, rows, weights, values, visible, totals, ahead + values - keys)

    for r in range(rows):
        share = ONE / weight_sum[r]
        total = float32_at(totals + r * columns * 4, size)
        target = float32_at(address(out) + ((first + r) * out.shape[1] + head * size) * 4, size)
        for d in range(size):
            target[d] = total[d] * share


@inline
def _highest_of(scores, visible, before):
    """The maximum of a block's scores (KEY_BLOCK,) and of those before it; the first `visible` count, the others become
    -inf."""
    for j in range(max(visible, 0), KEY_BLOCK):
        scores[j] = -np.inf
    return max(before, max_lanes(address(scores), KEY_BLOCK // LANES))


@inline
def _lessen(weight_sum, highest, new):
    """Rescale sums of weights that are relative to maxima `highest` to `new` ones; the factors take the former's place.

    All are (LANES,), a vector: so all rows of a tile take as long as one, and nothing branches.
    """
    for r in range(LANES):
        highest[r] = exp(highest[r] - new[r])
        weight_sum[r] *= highest[r]


@inline
def _exp_of(scores, highest):
    """Turn a block's scores (KEY_BLOCK,) into weights relative to the maximum so far; their sum."""
    for j in range(KEY_BLOCK):
        scores[j] = exp(scores[j] - highest)
    return sum_lanes(address(scores), KEY_BLOCK // LANES)


@inline
def _multiply(total, factor):
    for d in range(total.size):
        total[d] *= factor


def _no_distances(alibi, scores, head, distance):
    pass


def _add_distances(alibi, scores, head, distance):
    slope = alibi.slopes[head]
    for j in range(KEY_BLOCK):
        scores[j] = fma(slope, np.float32(distance + j), scores[j])


# add_distances(alibi, scores, head, distance): lessen a block's scores (KEY_BLOCK,) by how far their keys lie back;
# `distance` is the first key's from the query, 0 or less for all that are visible.
add_distances = by_type({Alibi: _add_distances}, otherwise=_no_distances)


@kernel
def _add_values(cache, rows, weights, values, keys, totals, following):
    """totals (rows, padded D) += weights (rows, keys) times a block's first values; `following`: what is read next."""
    columns, per_step = cache.shape[4], cache.shape[5]
    row_bytes, steps, done = columns * STEP_BYTES, (keys + per_step - 1) // per_step, 0
    while columns - done >= PANEL:
        where = values + done * 4, row_bytes, steps, totals + done * 4, row_bytes, following, LINE_BYTES
        panel_add(cache, rows, weights, SCORE_BYTES, *where)
        following += steps * PANEL * STEP_BYTES
        done += PANEL
    while done < columns:
        where = values + done * 4, row_bytes, steps, totals + done * 4, row_bytes, following, LINE_BYTES
        strip_add(cache, rows, weights, SCORE_BYTES, *where)
        following += steps * LINE_BYTES
        done += LANES


# What differs between caches, beside the tiles. Those of int8 have it in int8_cache.py.


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


# put_key(cache, at, x): put a key (D,) into its column of a block, which begins at `at`.
put_key = by_type({types.float32: _put_key_float32, types.uint16: _put_key_bfloat16, types.uint8: int8_cache.put_key})


def _put_value_float32(cache, start, position, x, column):
    target = float32_at(start + position * cache.strides[3], x.size)
    for d in range(x.size):
        target[d] = x[d]


def _put_value_bfloat16(cache, start, position, x, column):
    # An even position clears the odd one after it, which comes later: its weight is 0, and 0 * NaN would be NaN.
    target = uint32_at(start + position // 2 * cache.strides[3], x.size)
    if position % 2:
        for d in range(x.size):
            target[d] = _pair(target[d], to_bfloat16(x[d]))
    else:
        for d in range(x.size):
            target[d] = np.uint32(to_bfloat16(x[d]))


# put_value(cache, start, position, x, column): put a value (D,) where its position in a block lies after `start`, the
# first's, and its scale, if it has one, into its key's column.
put_value = by_type(
    {types.float32: _put_value_float32, types.uint16: _put_value_bfloat16, types.uint8: int8_cache.put_value}
)


@kernel
def _pair(low, high):
    """Two 16-bit numbers in one of 32 bits."""
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


# put_query(cache, target, x, scale): put scale * x, of a query x (D,), as a tile's left side multiplies it.
# bytes_of_query(cache): what it takes there.
_put_rounded, _rounded_bytes = (
    (_put_steps_bfloat16, _bytes_as_they_lie) if TARGET.multiplies_bfloat16 else (_put_steps_widened, _bytes_of_widened)
)
put_query = by_type({types.float32: _put_steps_float32, types.uint16: _put_rounded, types.uint8: int8_cache.put_query})
bytes_of_query = by_type(
    {types.float32: _bytes_as_they_lie, types.uint16: _rounded_bytes, types.uint8: int8_cache.bytes_of_query}
)


def _at_the_scores(cache, scores):
    return scores


def _behind_the_scores(cache, scores):
    return scores + TILE_ROWS * SCORE_BYTES


# place_of_weights(cache, scores): where softmax weights lie for a tile. In float32 they are what the scores become.
place_of_weights = by_type({types.float32: _at_the_scores}, otherwise=_behind_the_scores)


def _leave_weights(cache, target, weights, seen, value_scales):
    pass


def _put_weights(cache, target, weights, seen, value_scales):
    put_query(cache, target, weights, ONE)


# put_weights(cache, target, weights, seen, value_scales): put a block's softmax weights (KEY_BLOCK,) likewise, of which
# the first `seen` are not 0; value_scales: where those of the block's values lie, if they have any.
put_weights = by_type({types.float32: _leave_weights, types.uint8: int8_cache.put_weights}, otherwise=_put_weights)


def _all_steps(cache):
    return cache.shape[3]


# steps_of_key(cache): how many a tile of scores multiplies.
steps_of_key = by_type({types.uint8: int8_cache.steps_of_key}, otherwise=_all_steps)
