"""Causal attention over the KV cache: a kernel for lone tokens and one for runs, with bit-identical results.

Both merge blocks of KEY_BLOCK absolute positions in ascending order: a query's result depends on its position and the
cache up to it alone. Values after the last position that a warp sees count as 0, whatever their bits; between a warp's
queries they must be finite, as on the CPU. A warp of decode prefetches its block, 16 KiB if Dp is 64 in bfloat16: two
warps of an SM have the 25 KiB in flight that the bandwidth of an H200 takes.

dtype is the name of Numbers, size is Dp, the head size rounded up to a multiple of 32. `heads` are the epilogue's:
    q            (N, H, Dp), unscaled
    k_cache      (L, num_slots, H, padded_len, Dp)
    v_cache      the same in float32; (L, num_slots, H, padded_len / 2, Dp, 2) in 16 bits
                 both if is_int8: (L, num_slots, H, padded_len / KEY_BLOCK) runs of bytes, of attention_products.py
Other flat arrays:
    lone         (n,) int32, tokens; negative for none
    tiles        (t, 2) int32, the first token of a run of one sequence, and the token after its last
    partials     (n, H, max_blocks, 2 + Dp) float32: a block's highest score, sum of weights, weighted values
    merges       (n, H) int32, 0 between steps: blocks that are done
    slopes       (H,) float32, of ALiBi, if has_slopes
"""

import functools
import math

from numba import cuda, float32, int32, int64, uint32, uint64

from ..jit import (
    WARP,
    commit_copies,
    device_function,
    is_last_warp,
    kernel,
    let_next_kernel_begin,
    load_fresh,
    prefetch_run,
    shared_address,
    wait_for_copies,
    wait_for_kernel_before,
)
from ..params import NUMBERS, Numbers
from .attention_products import (
    DIM_BLOCK,
    KEY_BLOCK,
    SCALES_BYTES,
    TILE,
    Products,
    attention_products,
    blend,
    copy_block_function,
    merge,
    weigh_keys_function,
)

TILE_WARPS = 4  # of a block of attend_prefill
QUERY_TILE = 64  # tokens of one sequence that tile_blocks(...) blocks of attend_prefill take
# Of heads, up to which registers allow code of its own for blocks without masks, and two stages fit in 32 KiB.
WHOLE_SIZE = 64
TURNS_AT_ONCE = 8  # partials that a lane loads together


def tile_blocks(numbers: Numbers) -> int:
    """Return how many blocks share QUERY_TILE queries: a warp has 16 on tensor cores, 4 on ordinary units."""
    return 1 if numbers.has_mma else 4


@functools.cache
def attend_decode_kernel(size: int, dtype: str, has_slopes: bool = False, is_int8: bool = False):
    """Lone tokens: grid (max_blocks / warps, H, n), threads 32 * warps, a block of keys each. The last merges all."""
    numbers = NUMBERS[dtype]
    products = attention_products(size, numbers, is_int8, rows=1)
    HEADER = SCALES_BYTES if is_int8 else 0
    RUN = HEADER + KEY_BLOCK * size
    GROUP = TILE if is_int8 else 2  # positions that lie together
    ITEM = 1 if is_int8 else numbers.item_bytes
    combine = _combine_function(products, size)
    load_queries = products.load_queries
    load_values = products.load_values
    weigh_values = products.weigh_values
    weigh_keys = weigh_keys_function(products, has_slopes)
    QUERY_WORDS = products.query_words
    PACKED_WORDS = products.packed_words
    VALUE_WORDS = products.value_words
    ROWS = products.rows
    ROW_LANES = products.row_lanes
    DIMS = products.dims
    BLOCKS = size // DIM_BLOCK
    HELD = ROWS * DIMS

    def attend_decode(attended, merges, partials, heads, layer, lone, width, scale, slopes, max_blocks):
        let_next_kernel_begin()
        row = int32(cuda.blockIdx.z)
        n = lone[uint32(row)]
        head = int32(cuda.blockIdx.y)
        lane = int32(cuda.threadIdx.x & 31)
        key_block = int32(cuda.blockIdx.x * (cuda.blockDim.x >> 5) + (cuda.threadIdx.x >> 5))
        if n < 0:
            return
        last = int32(heads.positions[uint32(n)] - key_block * KEY_BLOCK)  # of the block's keys that count
        if last < 0:
            return
        start = _cache_start(heads, layer, uint32(n), head, RUN) + key_block * RUN
        if lane == 0:
            groups = min(last // GROUP + 1, KEY_BLOCK // GROUP)
            wanted = int32((HEADER + groups * (GROUP * size)) * ITEM)
            prefetch_run(heads.k_cache, start, wanted)
            prefetch_run(heads.v_cache, start, wanted)
        wait_for_kernel_before()
        words = cuda.local.array(QUERY_WORDS, uint32)
        newest = cuda.local.array(ROWS, int32)
        load_queries(words, heads, n, 1, head, lane)
        for r in range(ROWS):
            newest[r] = last if lane < ROW_LANES and r == 0 else -1
        highest = cuda.local.array(ROWS, float32)
        total = cuda.local.array(ROWS, float32)
        packed = cuda.local.array(PACKED_WORDS, uint32)
        sums = cuda.local.array(HELD, float32)
        values = cuda.local.array(VALUE_WORDS, uint32)
        load_values(values, heads.v_cache, start, last, lane)
        slope = slopes[head] if has_slopes else float32(0)
        weigh_keys(highest, total, packed, words, newest, heads, start, scale, slope, lane)

        merged = int32(row * heads.num_heads + head)
        first = int32(merged * max_blocks * (2 + size))
        out = uint64(first + int32(key_block * (2 + size)))
        if lane == 0:
            partials[out] = highest[0]
            partials[out + uint64(1)] = total[0]
        out += uint64(2 + lane * DIMS)
        for block in range(BLOCKS):
            weigh_values(sums, packed, values, heads.v_cache, start, block, last, lane)
            if lane < ROW_LANES:
                for i in range(DIMS):
                    partials[out + uint64(block * DIM_BLOCK + i)] = sums[i]
        key_blocks = int32(last // KEY_BLOCK + key_block + 1)
        if is_last_warp(merges, merged, key_blocks):
            combine(
                attended, n * width + head * heads.head_size, partials, first, key_blocks, heads.head_size
            )

    return kernel(attend_decode)


def _combine_function(products: Products, size: int):
    store, BLOCKS = products.store, size // DIM_BLOCK
    READ = TURNS_AT_ONCE * BLOCKS

    @device_function
    def combine(attended, out, partials, start, key_blocks, head_size):
        lane = int32(cuda.threadIdx.x & 31)
        highest, total = float32(-math.inf), float32(0)
        values = cuda.local.array(BLOCKS, float32)
        block_values = cuda.local.array(READ, float32)
        block_highest = cuda.local.array(TURNS_AT_ONCE, float32)
        block_total = cuda.local.array(TURNS_AT_ONCE, float32)
        for block in range(BLOCKS):
            values[block] = float32(0)
        for first in range(int32(0), key_blocks, int32(TURNS_AT_ONCE)):
            for i in range(TURNS_AT_ONCE):
                at = start + min(int32(first + i), int32(key_blocks - 1)) * int32(2 + size)
                block_highest[i], block_total[i] = load_fresh(partials, at), load_fresh(partials, at + 1)
                for block in range(BLOCKS):
                    block_values[i * BLOCKS + block] = load_fresh(partials, at + 2 + block * DIM_BLOCK + lane)
            for i in range(TURNS_AT_ONCE):
                # No branch around its exponentials.
                new = merge(highest, total, block_highest[i], block_total[i])
                if first + i < key_blocks:
                    highest, total = new[0], new[1]
                    for block in range(BLOCKS):
                        values[block] = blend(values[block], new[2], block_values[i * BLOCKS + block], new[3])

        share = float32(1) / total
        for block in range(BLOCKS):
            dim = block * DIM_BLOCK + lane
            if dim < head_size:
                store(attended, out + dim, values[block] * share)

    return combine


@functools.cache
def attend_prefill_kernel(size: int, dtype: str, has_slopes: bool = False, is_int8: bool = False):
    """Runs of a sequence's tokens: grid (tiles, H, tile_blocks), threads 32 * TILE_WARPS."""
    numbers = NUMBERS[dtype]
    IS_SHARED = numbers.has_mma and size <= WHOLE_SIZE and not is_int8
    products = attention_products(size, numbers, is_int8, is_shared=IS_SHARED)
    RUN = KEY_BLOCK * size + (SCALES_BYTES if is_int8 else 0)
    load_queries = products.load_queries
    take_blocks = (_take_shared_function if IS_SHARED else _take_function)(products, size, has_slopes, RUN)
    store = products.store
    QUERIES = products.queries
    QUERY_WORDS = products.query_words
    ROWS = products.rows
    ROW_LANES = products.row_lanes
    DIMS = products.dims
    BLOCKS = size // DIM_BLOCK
    HELD = ROWS * DIMS
    VALUES = size // DIM_BLOCK * ROWS * DIMS
    LANE_ROWS = WARP // ROW_LANES

    def attend_prefill(attended, heads, layer, tiles, width, scale, slopes):
        let_next_kernel_begin()
        wait_for_kernel_before()
        # The last tiles start first: they have the most keys.
        tile = int32(cuda.gridDim.x - 1 - cuda.blockIdx.x)
        head = int32(cuda.blockIdx.y)
        warp = int32(cuda.threadIdx.x >> 5)
        lane = int32(cuda.threadIdx.x & 31)
        words = cuda.local.array(QUERY_WORDS, uint32)
        newest = cuda.local.array(ROWS, int32)
        highest = cuda.local.array(ROWS, float32)
        total = cuda.local.array(ROWS, float32)
        values = cuda.local.array(VALUES, float32)
        begin = tiles[2 * tile]
        end = tiles[2 * tile + 1]
        first = int32(begin + (cuda.blockIdx.z * TILE_WARPS + warp) * QUERIES)
        count = int32(min(end - first, QUERIES))
        if count <= 0:
            if begin == end or not IS_SHARED:
                return
            first, count = begin, int32(0)  # this warp copies keys and values for others
        load_queries(words, heads, first, max(count, int32(1)), head, lane)
        for r in range(ROWS):
            row = int32(lane // ROW_LANES + LANE_ROWS * r)
            newest[r] = heads.positions[first + row] if row < count else -1
            highest[r], total[r] = float32(-math.inf), float32(0)
        for i in range(VALUES):
            values[i] = float32(0)

        start = _cache_start(heads, layer, first, head, RUN)
        slope = slopes[head] if has_slopes else float32(0)
        oldest = heads.positions[first] if count else int32(-1)
        last = heads.positions[first + count - 1] if count else int32(-1)
        span = oldest, last, heads.positions[end - 1]
        take_blocks(highest, total, values, words, newest, heads, start, *span, scale, slope, lane)
        for r in range(ROWS):
            row = int32(lane // ROW_LANES + LANE_ROWS * r)
            if row < count:
                share = float32(1) / total[r]
                out = (first + row) * width + head * heads.head_size
                for block in range(BLOCKS):
                    for i in range(DIMS):
                        dim = int32(block * DIM_BLOCK + lane % ROW_LANES * DIMS + i)
                        if dim < heads.head_size:
                            store(attended, out + dim, values[block * HELD + r * DIMS + i] * share)

    return kernel(attend_prefill)


def _take_function(products: Products, size: int, has_slopes: bool, run: int):
    """Return the function that merges all blocks into a softmax.

    run: numbers of the cache from one block to the next
    oldest, last: positions of a warp's queries, -1 for none. end: the last of the tile.
    """
    take_block = _take_block_function(products, size, has_slopes)

    @device_function
    def take_blocks(
        highest, total, values, words, newest, heads, start, oldest, last, end, scale, slope, lane
    ):
        softmax = highest, total, values
        while last >= 0:
            take_block(*softmax, words, newest, heads, start, last, scale, slope, lane)
            start = start + run
            last = int32(last - KEY_BLOCK)

    return take_blocks


def _take_shared_function(products: Products, size: int, has_slopes: bool, run: int):
    """As _take_function: a tile's warps copy each block to shared memory while they take the one before."""
    take_whole = _take_block_function(products, size, has_slopes, is_whole=True)
    take_block = _take_block_function(products, size, has_slopes)
    copy_block = copy_block_function(size, TILE_WARPS * WARP)
    STAGE_BYTES = 2 * 2 * KEY_BLOCK * size
    WORDS = 2 * STAGE_BYTES // 4

    @device_function
    def take_blocks(
        highest, total, values, words, newest, heads, start, oldest, last, end, scale, slope, lane
    ):
        softmax = highest, total, values
        stage = shared_address(cuda.shared.array(WORDS, uint32, alignment=16))
        both = int32(2 * stage) + STAGE_BYTES
        copy_block(stage, heads, start)
        commit_copies()
        while end >= 0:
            wait_for_copies(0)
            cuda.syncthreads()  # and no warp is at the block before
            other = uint32(both - stage)
            if end >= KEY_BLOCK:
                start = start + run
                copy_block(other, heads, start)
                commit_copies()
            if oldest >= KEY_BLOCK - 1:  # all keys of the block count for all queries
                take_whole(*softmax, words, newest, heads, stage, last, scale, slope, lane)
            elif last >= 0:
                take_block(*softmax, words, newest, heads, stage, last, scale, slope, lane)
            stage = other
            oldest = int32(oldest - KEY_BLOCK)
            last = int32(last - KEY_BLOCK)
            end = int32(end - KEY_BLOCK)

    return take_blocks


def _take_block_function(products: Products, size: int, has_slopes: bool, is_whole: bool = False):
    """Return the function that merges a block of keys into a softmax. newest is then the next block's."""
    weigh_keys = weigh_keys_function(products, has_slopes, is_whole)
    weigh_values = products.weigh_values
    ROWS = products.rows
    DIMS = products.dims
    HELD = ROWS * DIMS
    PACKED_WORDS = products.packed_words
    VALUE_WORDS = products.value_words

    @device_function
    def take_block(highest, total, values, words, newest, heads, start, last, scale, slope, lane):
        block_highest = cuda.local.array(ROWS, float32)
        block_total = cuda.local.array(ROWS, float32)
        kept = cuda.local.array(ROWS, float32)
        added = cuda.local.array(ROWS, float32)
        packed = cuda.local.array(PACKED_WORDS, uint32)
        sums = cuda.local.array(HELD, float32)
        held = cuda.local.array(VALUE_WORDS, uint32)
        if is_whole:
            last = int32(2 * KEY_BLOCK)  # which the compiler knows
        weighed = block_highest, block_total, packed
        weigh_keys(*weighed, words, newest, heads, start, scale, slope, lane)
        for r in range(ROWS):
            new = merge(highest[r], total[r], block_highest[r], block_total[r])
            highest[r], total[r], kept[r], added[r] = new
        for block in range(size // DIM_BLOCK):
            weigh_values(sums, packed, held, heads.v_cache, start, block, last, lane)
            for i in range(HELD):
                if is_whole or newest[i // DIMS] >= 0:  # else 0 times NaN, or 0 for -0
                    value = values[block * HELD + i]
                    values[block * HELD + i] = blend(value, kept[i // DIMS], sums[i], added[i // DIMS])
        for r in range(ROWS):
            newest[r] -= KEY_BLOCK

    return take_block


@device_function
def _cache_start(heads, layer, token, head, run):
    """Return a head's first number in the cache. run: numbers of the cache from one block to the next."""
    slot = layer * heads.num_slots + heads.token_slots[token]
    return int64(slot * heads.num_heads + head) * (heads.padded_len // KEY_BLOCK * run)
