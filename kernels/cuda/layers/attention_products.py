"""Products of attention for one warp: scores of a block of keys, weighted values, and the softmax between them.

`row_lanes` lanes share a query's row: a lane has rows (lane + 32 r) // row_lanes; of each row, scores i of the keys
2 row_lanes (i // 2) + 2 (lane % row_lanes) + i % 2, and of a block of DIM_BLOCK dims those from
dims * (lane % row_lanes) on. Tensor cores have mma's layout: 16 queries, 4 lanes to a row.

Online softmax: Milakov and Gimelshein (2018). Sums take products by `fma`, so that all kernels round alike.

An int8 cache has for each KEY_BLOCK the float32 scales, in the order of lanes, then tiles of 16 positions and 32 dims,
16 bytes a lane: 4 g + q has dims 8 q on of the keys g and g + 8; or of the dims 4 g on, each a word, the values of
positions 2 q, 2 q + 8, 2 q + 1 and 2 q + 9. Eight dims of a key are in the order 0, 2, 1, 3, 4, 6, 5, 7. Whole numbers
are exact in the family's; scales multiply the products of keys, and the weights of values after their sum.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, int32, int64, uint32

from ...numbers import SCALE_BYTES
from ..jit import (
    ALL_LANES,
    WARP,
    bits_to_float32,
    copy_async,
    device_function,
    float32_to_bits,
    four,
    load_cached,
    load_shared,
    unrolled,
)
from ..params import LOAD_BYTES, Numbers

KEY_BLOCK = 64  # positions
KEY_TILES = KEY_BLOCK // 8  # columns of an mma
KEY_STEPS = KEY_BLOCK // 16  # of K of an mma
DIM_BLOCK = 32
LOADS = 8  # that a lane asks for together
CHUNK = 8  # numbers of 16 bits that a lane loads, or copies to shared memory
CHUNK_BYTES = 2 * CHUNK
TILE = 16  # positions of an int8 cache
TILE_BYTES = TILE * DIM_BLOCK
SCALES_BYTES = KEY_BLOCK * SCALE_BYTES
LIFT = 64  # of weights times scales, up to 1 / 127 of a value: float16 would round them as denormal


@dataclass(frozen=True)
class Products:
    """The device functions of a dtype, and the counts that a lane holds."""

    rows: int
    row_lanes: int
    query_words: int  # uint32
    packed_words: int  # uint32
    value_words: int  # uint32
    load_queries: Callable  # (words, heads, first, count, head, lane)
    multiply_keys: Callable  # (scores (rows, KEY_BLOCK / row_lanes), words, k_cache, start, lane)
    pack_weights: Callable  # (packed, weights)
    load_values: Callable  # (held (value_words,), v_cache, start, newest, lane)
    weigh_values: Callable  # (sums (rows, dims), packed, held, v_cache, start, block, newest, lane)
    store: Callable  # (attended, index, value)
    scale_weights: Callable | None = None  # (weights, newest, v_cache, start, lane): all LIFT times

    @property
    def queries(self) -> int:
        return self.rows * WARP // self.row_lanes

    @property
    def dims(self) -> int:
        return DIM_BLOCK // self.row_lanes


def attention_products(
    size: int, numbers: Numbers, is_int8: bool, rows: int = 2, is_shared: bool = False
) -> Products:
    """rows: of a lane on tensor cores, twice as many on ordinary units; 1 if a warp has one query.

    is_shared: `start` is the shared address to which `copy_block` has copied a block.
    """
    if numbers.has_mma:
        return _mma_products(size, rows, numbers, is_int8, is_shared)
    return _fma_products(size, rows * rows, numbers)


def _mma_products(size: int, rows: int, numbers: Numbers, is_int8: bool, is_shared: bool) -> Products:
    """Return the functions on tensor cores.

    The halves of a lane's 16 bytes, from dim 8 (lane % 4) on, serve two products: these take dims in any order.
    """
    pack = numbers.pack
    BLOCKS = size // DIM_BLOCK

    @device_function
    def load_queries(words, heads, first, count, head, lane):
        for r in range(rows):
            row = min(int32((lane >> 2) + 8 * r), int32(count - 1))
            at = int64(int32(((first + row) * heads.num_heads + head) * size + (lane & 3) * 8))
            for block in range(BLOCKS):
                loaded = load_cached(heads.q, at + block * DIM_BLOCK)
                for k in range(4):
                    words[8 * block + 2 * k + r] = loaded[k]

    @device_function
    def scale_weights(weights, newest, v_cache, start, lane):
        for step in range(KEY_STEPS):
            scales = _load_scales(v_cache, start, step, lane)
            for r in range(rows):
                last = int32(newest[r] - 2 * (lane & 3) - 16 * step)
                for i in range(4):
                    k = r * 2 * KEY_TILES + 4 * step + i
                    is_seen = i // 2 * 8 + i % 2 <= last  # else the scale may be NaN
                    weights[k] = weights[k] * (scales[i] * float32(LIFT)) if is_seen else float32(0)

    @device_function
    def pack_weights(packed, weights):
        for i in range(4 * KEY_STEPS):  # step i // 4 of 16 keys, row i % 2, keys 8 (i // 2 % 2) on
            if i % 2 < rows:
                k = i % 2 * 2 * KEY_TILES + i // 2 * 2
                packed[i] = pack(weights[k], weights[k + 1])

    kind = size, rows, numbers, is_int8, is_shared
    multiply_keys = _keys_function(*kind)
    value_words, *of_values = _value_functions(*kind)
    counts = rows, 4, 8 * BLOCKS, 4 * KEY_STEPS, value_words
    functions = load_queries, multiply_keys, pack_weights, *of_values, numbers.store
    return Products(*counts, *functions, scale_weights if is_int8 else None)


def _operand_function(rows: int) -> Callable:
    @device_function
    def operand(words, first):
        if rows == 2:
            return four(words, first)
        return words[first], uint32(0), words[first + 2], uint32(0)

    return operand


def _keys_function(size: int, rows: int, numbers: Numbers, is_int8: bool, is_shared: bool) -> Callable:
    """Return `multiply_keys`."""
    mma = numbers.mma
    expand = numbers.expand
    operand = _operand_function(rows)
    BLOCKS = size // DIM_BLOCK

    @device_function
    def load_keys(k_cache, start, tile, block, lane):
        row = lane >> 2
        if is_shared:
            chunk = _key_chunk(int32(row * (size // CHUNK) + (block * 4 + (lane & 3))), size)
            return load_shared(start + uint32(chunk * CHUNK_BYTES) + uint32(tile * 16 * size))
        at = start + int32(row * size + (lane & 3) * 8)
        return load_cached(k_cache, at + (tile * 8 * size + block * DIM_BLOCK))

    @device_function
    def multiply(words, block, keys, sums):
        w = 8 * block
        sums = mma(operand(words, w), (keys[0], keys[1]), sums)
        return mma(operand(words, w + 4), (keys[2], keys[3]), sums)

    @device_function
    def multiply_keys(scores, words, k_cache, start, lane):
        for tile in range(KEY_TILES):  # of 8 keys
            sums = (float32(0), float32(0), float32(0), float32(0))
            for block in range(BLOCKS):
                keys = load_keys(k_cache, start, tile, block, lane)
                sums = multiply(words, block, keys, sums)
            for i in range(2 * rows):
                scores[i // 2 * 2 * KEY_TILES + 2 * tile + i % 2] = sums[i]

    @device_function
    def multiply_int8_keys(scores, words, k_cache, start, lane):
        for step in range(KEY_STEPS):
            scales = _load_scales(k_cache, start, step, lane)
            low = high = (float32(0), float32(0), float32(0), float32(0))
            for block in range(BLOCKS):
                keys = _load_tile(k_cache, start, step * BLOCKS + block, lane)
                low = multiply(words, block, expand(keys[0]) + expand(keys[1]), low)
                high = multiply(words, block, expand(keys[2]) + expand(keys[3]), high)
            for i in range(2 * rows):
                k = i // 2 * 2 * KEY_TILES + 4 * step + i % 2
                scores[k] = low[i] * scales[i % 2]
                scores[k + 2] = high[i] * scales[2 + i % 2]

    return multiply_int8_keys if is_int8 else multiply_keys


def _value_functions(size: int, rows: int, numbers: Numbers, is_int8: bool, is_shared: bool) -> tuple:
    """Return the words of values that a lane holds, `load_values` and `weigh_values`."""
    mma = numbers.mma
    expand = numbers.expand
    operand = _operand_function(rows)
    BLOCKS = size // DIM_BLOCK
    WORDS = 4 if is_int8 else 8  # of a lane's values, for a step and a block
    HOLDS_VALUES = rows == 1 and BLOCKS * WORDS <= 16  # in registers, during the products of keys

    @device_function
    def load_pairs(v_cache, start, block, step, lane):
        # A pair of positions is a word of an operand. A lane reads 4 dims of two pairs, for products 4 dims apart.
        if is_shared:
            chunk = _value_chunk(int32((lane & 3) * (size // 4) + (lane >> 2)), size)
            place = start + uint32(chunk * CHUNK_BYTES)
            place += uint32(2 * KEY_BLOCK * size + step * 32 * size + block * 4 * DIM_BLOCK)
            return load_shared(place), load_shared(place + uint32(16 * size))
        at = (
            start
            + int64(int32((lane & 3) * 2 * size + (lane >> 2) * 8))
            + (step * 16 * size + block * 2 * DIM_BLOCK)
        )
        return load_cached(v_cache, at), load_cached(v_cache, at + 8 * size)

    @device_function
    def hold_pairs(held, first, v_cache, start, block, step, lane):
        low, high = load_pairs(v_cache, start, block, step, lane)
        for j in range(4):
            held[first + j] = low[j]
            held[first + 4 + j] = high[j]

    @device_function
    def hold_int8(held, first, v_cache, start, block, step, lane):
        values = _load_tile(v_cache, start, step * BLOCKS + block, lane)
        for j in range(4):
            held[first + j] = values[j]

    @device_function
    def kept_pairs(held, at, left):
        return uint32(held[at] & _kept(left)), uint32(held[at + 4] & _kept(int32(left - 8)))

    @device_function
    def expanded(held, at, left):
        return expand(held[at])  # finite after the last, with weight 0

    hold_step = hold_int8 if is_int8 else hold_pairs
    values_of = expanded if is_int8 else kept_pairs

    @device_function
    def load_values(held, v_cache, start, newest, lane):
        for block in range(BLOCKS if HOLDS_VALUES else 0):
            for step in range(KEY_STEPS):
                if step < KEY_STEPS // 2 or newest >= KEY_BLOCK // 2:
                    hold_step(held, (block * KEY_STEPS + step) * WORDS, v_cache, start, block, step, lane)

    @device_function
    def weigh_values(sums, packed, held, v_cache, start, block, newest, lane):
        for i in range(8 * rows):
            sums[i] = float32(0)
        left = int32(newest - (lane & 3) * 2)
        for step in range(KEY_STEPS):
            if step == KEY_STEPS // 2 and newest < KEY_BLOCK // 2:
                return
            weights = operand(packed, 4 * step)
            w = (block * KEY_STEPS + step) * WORDS if HOLDS_VALUES else 0
            if not HOLDS_VALUES:
                hold_step(held, w, v_cache, start, block, step, lane)
            for j in range(4):
                values = values_of(held, w + j, int32(left - 16 * step))
                if rows == 2:
                    new = mma(weights, values, (sums[j], sums[4 + j], sums[8 + j], sums[12 + j]))
                    sums[j], sums[4 + j], sums[8 + j], sums[12 + j] = new
                else:
                    new = mma(weights, values, (sums[j], sums[4 + j], float32(0), float32(0)))
                    sums[j], sums[4 + j] = new[0], new[1]

    return WORDS * (KEY_STEPS * BLOCKS if HOLDS_VALUES else 1), load_values, weigh_values


@device_function
def _load_scales(cache, start, step, lane):
    """Return the scales of a lane's positions of a step of 16: 2 q, 2 q + 1, 2 q + 8, 2 q + 9."""
    a, b, c, d = load_cached(cache, start + ((lane & 3) * (SCALES_BYTES // 4) + step * LOAD_BYTES))
    return bits_to_float32(a), bits_to_float32(b), bits_to_float32(c), bits_to_float32(d)


@device_function
def _load_tile(cache, start, tile, lane):
    return load_cached(cache, start + (lane * LOAD_BYTES + (SCALES_BYTES + tile * TILE_BYTES)))


def copy_block_function(size: int, threads: int):
    """Return the function by which a block's threads copy keys, then values, to a shared address."""
    COPIES = KEY_BLOCK * size // CHUNK // threads
    STRIDE = threads * CHUNK  # of whole rows, which repeat the order of chunks

    @device_function
    def copy_block(stage, heads, start):
        thread = int32(cuda.threadIdx.x)
        keys = stage + uint32(_key_chunk(thread, size) * CHUNK_BYTES)
        values = stage + uint32(_value_chunk(thread, size) * CHUNK_BYTES) + uint32(2 * KEY_BLOCK * size)
        at = start + thread * CHUNK
        for i in range(COPIES):
            copy_async(keys + uint32(2 * i * STRIDE), heads.k_cache, at + i * STRIDE)
        for i in range(COPIES):
            copy_async(values + uint32(2 * i * STRIDE), heads.v_cache, at + i * STRIDE)

    return copy_block


# Shared memory serves eight lanes of 16 bytes at once if they are in different eighths of 128 bytes. Eight lanes read
# 4 chunks of two keys, which may be 128 bytes apart, or 2 chunks of four pairs of positions.


@device_function
def _key_chunk(chunk, size):
    """Return the place of a chunk of keys: odd keys have halves of 128 bytes swapped, if that is a key's size."""
    return chunk ^ (chunk >> 1 & 4) if size == 2 * DIM_BLOCK else chunk


@device_function
def _value_chunk(chunk, size):
    return chunk ^ 2 * (chunk // (size // 4) & 3)


@device_function
def _kept(distance):
    """Return a mask of two values, the first `distance` before the last that counts."""
    if distance > 0:
        return uint32(0xFFFFFFFF)
    return uint32(0xFFFF) if distance == 0 else uint32(0)


def _fma_products(size: int, rows: int, numbers: Numbers) -> Products:
    """Return the functions on ordinary units: lanes exchange dims and weights by shuffles."""
    BLOCKS = size // DIM_BLOCK

    @device_function
    def load_queries(words, heads, first, count, head, lane):
        for r in range(rows):
            row = first + min(int32(r), int32(count - 1))
            for block in range(BLOCKS):
                at = (row * heads.num_heads + head) * size + lane + block * DIM_BLOCK
                words[block * rows + r] = float32_to_bits(heads.q[at])

    @device_function
    def multiply_dims(block, scores, words, k_cache, at):
        for word in range(DIM_BLOCK // 4):
            offset = block * DIM_BLOCK + word * 4
            even = load_cached(k_cache, at + offset)
            odd = load_cached(k_cache, at + (offset + size))
            for k in range(4):
                for r in range(rows):
                    query = bits_to_float32(words[block * rows + r])
                    query = cuda.shfl_sync(uint32(ALL_LANES), query, word * 4 + k)
                    scores[2 * r] = cuda.fma(query, bits_to_float32(even[k]), scores[2 * r])
                    scores[2 * r + 1] = cuda.fma(query, bits_to_float32(odd[k]), scores[2 * r + 1])

    multiply_blocks = unrolled(multiply_dims, BLOCKS)

    @device_function
    def multiply_keys(scores, words, k_cache, start, lane):
        for i in range(2 * rows):
            scores[i] = float32(0)
        multiply_blocks(scores, words, k_cache, start + int32(lane * 2 * size))

    @device_function
    def pack_weights(packed, weights):
        for i in range(2 * rows):
            packed[i] = float32_to_bits(weights[i])

    @device_function
    def load_values(held, v_cache, start, newest, lane):
        pass

    @device_function
    def weigh_values(sums, packed, held, v_cache, start, block, newest, lane):
        at = start + int32(block * DIM_BLOCK + lane)
        for r in range(rows):
            sums[r] = float32(0)
        values = cuda.local.array(LOADS, float32)
        for key in range(int32(0), int32(KEY_BLOCK), int32(LOADS)):
            for i in range(LOADS):
                values[i] = v_cache[at + min(int32(key + i), newest) * size]
            for i in range(LOADS):
                for r in range(rows):
                    weight = bits_to_float32(packed[2 * r + i % 2])
                    weight = cuda.shfl_sync(uint32(ALL_LANES), weight, (key + i) // 2)  # 0 after the newest
                    sums[r] = cuda.fma(weight, values[i], sums[r])

    functions = load_queries, multiply_keys, pack_weights, load_values, weigh_values, numbers.store
    return Products(rows, 32, rows * BLOCKS, 2 * rows, 1, *functions)


def weigh_keys_function(products: Products, has_slopes: bool, is_whole: bool = False):
    """Return the function that packs weights exp(score - highest) of a block's keys up to `newest`, 0 of later keys.

    is_whole: there are no later keys, but for rows that are no query's.

    A score is scale q·k - slope * distance, the latter if has_slopes.
    highest and total (rows,): -inf and 0 if newest is negative.
    """
    multiply_keys = products.multiply_keys
    pack_weights = products.pack_weights
    scale_weights = products.scale_weights
    HAS_SCALES = scale_weights is not None
    ROWS = products.rows
    ROW_LANES = products.row_lanes
    KEYS = KEY_BLOCK // ROW_LANES
    STEPS = ROW_LANES.bit_length() - 1
    SCORES = ROWS * KEYS

    @device_function
    def weigh_keys(highest, total, packed, words, newest, heads, start, scale, slope, lane):
        scores = cuda.local.array(SCORES, float32)
        multiply_keys(scores, words, heads.k_cache, start, lane)
        for r in range(ROWS):
            last = int32(newest[r] - 2 * (lane & ROW_LANES - 1))
            top = float32(-math.inf)
            for i in range(KEYS):
                key = 2 * ROW_LANES * (i // 2) + i % 2
                score = cuda.fma(scores[r * KEYS + i], scale, float32(0))
                if has_slopes:
                    score = cuda.fma(-slope, float32(int32(last - key)), score)
                if not is_whole and key > last:
                    score = float32(-math.inf)
                scores[r * KEYS + i] = score
                top = max(top, score)
            for step in range(STEPS):
                top = max(top, cuda.shfl_xor_sync(uint32(ALL_LANES), top, 1 << step))
            highest[r] = top
            if not is_whole and newest[r] < 0:  # no key: -inf minus -inf is NaN
                top = float32(0)
            whole = float32(0)
            for i in range(KEYS):
                weight = math.exp(scores[r * KEYS + i] - top)
                scores[r * KEYS + i] = weight
                whole += weight
            for step in range(STEPS):
                whole += cuda.shfl_xor_sync(uint32(ALL_LANES), whole, 1 << step)
            total[r] = whole * float32(LIFT) if HAS_SCALES else whole
        if HAS_SCALES:
            scale_weights(scores, newest, heads.v_cache, start, lane)
        pack_weights(packed, scores)

    return weigh_keys


@device_function
def merge(highest, total, block_highest, block_total):
    """Merge a block into the softmax before it. Return the new highest and total, and factors of `blend`."""
    top = max(highest, block_highest)
    kept = math.exp(highest - top)
    added = math.exp(block_highest - top)
    return top, blend(total, kept, block_total, added), kept, added


@device_function
def blend(before, kept, value, added):
    return cuda.fma(before, kept, value * added)
