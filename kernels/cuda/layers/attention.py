"""Causal attention over the KV cache: a kernel for decode and one for prefill, with the same results to the bit.

Keys and values are read in blocks of KEY_BLOCK absolute positions. In each kernel a warp weighs a block for a query by
the same device functions, and blocks are merged in ascending order by the same operations: the result for a query
depends on its position and the cache up to it alone. A masked key has weight 0. The cache after the newest position may
hold anything.
"""

import functools
import math

from tinygpt.kernels.cuda.layers.attention_products import (
    BLOCK,
    KEY_BLOCK,
    Products,
    attention_products,
    blend,
    chunk_weights,
    merge,
)
from tinygpt.kernels.cuda.runtime.block import ALL_LANES, WARP
from tinygpt.kernels.cuda.runtime.jit import device_function, kernel
from tinygpt.kernels.cuda.runtime.ptx import (
    arrive,
    let_next_kernel_begin,
    load_fresh,
    prefetch_run,
    wait_for_kernel_before,
)

from numba import cuda, float32, int32, int64, uint32  # isort: skip

QUERY_TILE = 64  # tokens
TILE_WARPS = 4  # of a block of attend_tiles
AT_ONCE = 8  # partials that a lane asks for together


def padded_head(head_size: int) -> int:
    """Dp"""
    return -(-head_size // 32) * 32


@functools.cache
def attend_chunks_kernel(size: int, dtype: str):
    """Decode: tokens that are each the newest of their sequence.

    A warp takes a chunk of a token and head: grid (max_chunks / warps rounded up, H, N), threads 32 * warps. One warp
    a block spreads a small batch over the most SMs; with 4, more of a large one fits on each. The
    warp that is the last to have finished a chunk of a token and head merges them all, in their order.
    """
    attend_chunk, prefetch_chunk = chunk_function(attention_products(size, dtype), size), prefetch_function(size, dtype)

    def attend_chunks(
        attended, merges, partials, q, k_cache, v_cache, layer, num_slots, padded_len,
        positions, token_slots, sizes, num_heads, head_size, width, scale, max_chunks,
    ):  # fmt: skip
        let_next_kernel_begin()
        n, head, lane = int32(cuda.blockIdx.z), int32(cuda.blockIdx.y), int32(cuda.threadIdx.x & 31)
        chunk = int32(cuda.blockIdx.x * (cuda.blockDim.x >> 5) + (cuda.threadIdx.x >> 5))
        if n >= sizes[0]:
            return
        last = int32(positions[n] - chunk * KEY_BLOCK)  # of the chunk's keys
        if last < 0:
            return
        start = (
            cache_start(layer, num_slots, token_slots[n], num_heads, head, padded_len * size) + chunk * KEY_BLOCK * size
        )
        if lane == 0:
            prefetch_chunk(k_cache, v_cache, start, last)
        wait_for_kernel_before()
        where = start, last, n, num_heads, head, chunk, max_chunks
        attend_chunk(attended, merges, partials, q, k_cache, v_cache, *where, scale, head_size, width)

    return kernel(attend_chunks)


def prefetch_function(size: int, dtype: str):
    """prefetch_chunk(k_cache, v_cache, start, last): a chunk's keys and values up to `last` on their way to L2."""
    ITEM = 4 if dtype == "float32" else 2

    @device_function
    def prefetch_chunk(k_cache, v_cache, start, last):
        wanted = int32(min(last + 2, KEY_BLOCK) * size * ITEM)  # an even number of positions
        prefetch_run(k_cache, start, wanted)
        prefetch_run(v_cache, start, wanted)

    return prefetch_chunk


def chunk_function(products: Products, size: int):
    """The device function of a warp that takes a chunk of a token and head, which begins at `start` in the caches.

    attend_chunk(attended, merges, partials, q, k_cache, v_cache, start, last, n, num_heads, head, chunk, max_chunks,
    scale, head_size, width); last: the chunk's last key that counts. The last warp of a token and head merges.
    """
    combine = combine_function(products, size)
    load_queries, weigh_keys, weigh_values = products.load_queries, chunk_weights(products), products.weigh_values
    QUERY_WORDS, PACKED_WORDS = products.query_words, products.packed_words
    ROWS, ROW_LANES, DIMS, BLOCKS = products.rows, products.row_lanes, products.dims, size // BLOCK
    HELD = ROWS * DIMS

    @device_function
    def attend_chunk(
        attended, merges, partials, q, k_cache, v_cache,
        start, last, n, num_heads, head, chunk, max_chunks, scale, head_size, width,
    ):  # fmt: skip
        lane = int32(cuda.threadIdx.x & 31)
        words, newest = cuda.local.array(QUERY_WORDS, uint32), cuda.local.array(ROWS, int32)
        load_queries(words, q, n, 1, head, num_heads, lane)
        for r in range(ROWS):
            newest[r] = last if lane < ROW_LANES and r == 0 else -1
        highest, total = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32)
        packed, sums = cuda.local.array(PACKED_WORDS, uint32), cuda.local.array(HELD, float32)
        weigh_keys(highest, total, packed, words, newest, k_cache, start, scale, lane)

        out = ((n * num_heads + head) * max_chunks + chunk) * (2 + size)
        if lane == 0:
            partials[out], partials[out + 1] = highest[0], total[0]
        for block in range(BLOCKS):
            weigh_values(sums, packed, v_cache, start, block, last, lane)
            if lane < ROW_LANES:
                for i in range(DIMS):
                    partials[out + 2 + block * BLOCK + lane * DIMS + i] = sums[i]
        chunks = int32(last // KEY_BLOCK + chunk + 1)
        if is_last(merges, n * num_heads + head, chunks):
            combine(attended, partials, n, num_heads, head, chunks, max_chunks, head_size, width)

    return attend_chunk


@device_function
def is_last(merges, index, chunks):
    """Whether this warp is the last of `chunks` warps that ask; what the others have written before, it may read."""
    cuda.syncwarp()
    arrived = int32(0)
    if cuda.threadIdx.x % WARP == 0:
        arrived = int32(arrive(merges, index))
        if arrived == chunks - 1:
            merges[index] = int32(0)
    arrived = cuda.shfl_sync(uint32(ALL_LANES), arrived, 0)
    cuda.syncwarp()
    return arrived == chunks - 1


def combine_function(products: Products, size: int):
    """The device function of a warp that merges the partials of a token and head, which any warps have written.

    combine(attended, partials, n, num_heads, head, chunks, max_chunks, head_size, width)
    """
    store, BLOCKS = products.store, size // BLOCK
    READ = AT_ONCE * BLOCKS

    @device_function
    def combine(attended, partials, n, num_heads, head, chunks, max_chunks, head_size, width):
        lane = int32(cuda.threadIdx.x & 31)
        start = (n * num_heads + head) * max_chunks * (2 + size)

        highest, total = float32(-math.inf), float32(0)
        values, chunk_values = cuda.local.array(BLOCKS, float32), cuda.local.array(READ, float32)
        chunk_highest, chunk_total = cuda.local.array(AT_ONCE, float32), cuda.local.array(AT_ONCE, float32)
        for block in range(BLOCKS):
            values[block] = float32(0)
        for first in range(int32(0), chunks, int32(AT_ONCE)):
            for i in range(AT_ONCE):
                at = start + min(first + i, chunks - 1) * (2 + size)
                chunk_highest[i], chunk_total[i] = load_fresh(partials, at), load_fresh(partials, at + 1)
                for block in range(BLOCKS):
                    chunk_values[i * BLOCKS + block] = load_fresh(partials, at + 2 + block * BLOCK + lane)
            for i in range(AT_ONCE):
                if first + i < chunks:
                    highest, total, kept, added = merge(highest, total, chunk_highest[i], chunk_total[i])
                    for block in range(BLOCKS):
                        values[block] = blend(values[block], kept, chunk_values[i * BLOCKS + block], added)

        share, out = float32(1) / total, n * width + head * head_size
        for block in range(BLOCKS):
            dim = block * BLOCK + lane
            if dim < head_size:
                store(attended, out + dim, values[block] * share)

    return combine


@functools.cache
def attend_tiles_kernel(size: int, dtype: str):
    """Prefill and mixed steps: grid (tiles, H), threads 32 * TILE_WARPS.

    A warp takes some queries of a tile and a head. A tile may be empty. The last tiles begin first: in a long prompt
    they have the most keys.
    """
    products = attention_products(size, dtype)
    load_queries, weigh_keys, weigh_values = products.load_queries, chunk_weights(products), products.weigh_values
    store, QUERIES, QUERY_WORDS = products.store, products.queries, products.query_words
    ROWS, ROW_LANES, DIMS, PACKED_WORDS = products.rows, products.row_lanes, products.dims, products.packed_words
    BLOCKS, HELD = size // BLOCK, ROWS * DIMS
    VALUES, TURNS = BLOCKS * HELD, QUERY_TILE // (TILE_WARPS * QUERIES)

    def attend_tiles(
        attended, q, k_cache, v_cache, layer, num_slots, padded_len,
        positions, token_slots, tiles, num_heads, head_size, width, scale,
    ):  # fmt: skip
        let_next_kernel_begin()
        wait_for_kernel_before()
        tile, head = int32(cuda.gridDim.x - 1 - cuda.blockIdx.x), int32(cuda.blockIdx.y)
        warp, lane = int32(cuda.threadIdx.x >> 5), int32(cuda.threadIdx.x & 31)
        words, newest = cuda.local.array(QUERY_WORDS, uint32), cuda.local.array(ROWS, int32)
        highest, total = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32)
        values = cuda.local.array(VALUES, float32)
        chunk_highest, chunk_total = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32)
        kept, added = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32)
        packed, sums = cuda.local.array(PACKED_WORDS, uint32), cuda.local.array(HELD, float32)
        for turn in range(TURNS):
            first = int32(tiles[tile] + (turn * TILE_WARPS + warp) * QUERIES)
            count = int32(min(tiles[tile + 1] - first, QUERIES))
            if count <= 0:
                return
            load_queries(words, q, first, count, head, num_heads, lane)
            for r in range(ROWS):
                row = int32(lane // ROW_LANES + 8 * r)
                newest[r] = positions[first + row] if row < count else -1
                highest[r], total[r] = float32(-math.inf), float32(0)
            for i in range(VALUES):
                values[i] = float32(0)

            start = cache_start(layer, num_slots, token_slots[first], num_heads, head, padded_len * size)
            last = positions[first + count - 1]
            while last >= 0:
                weigh_keys(chunk_highest, chunk_total, packed, words, newest, k_cache, start, scale, lane)
                for r in range(ROWS):
                    new = merge(highest[r], total[r], chunk_highest[r], chunk_total[r])
                    highest[r], total[r], kept[r], added[r] = new
                for block in range(BLOCKS):
                    weigh_values(sums, packed, v_cache, start, block, last, lane)
                    for i in range(HELD):
                        if newest[i // DIMS] >= 0:  # otherwise sums may be 0 times NaN, and -0 would become 0
                            value = values[block * HELD + i]
                            values[block * HELD + i] = blend(value, kept[i // DIMS], sums[i], added[i // DIMS])
                start, last = start + KEY_BLOCK * size, int32(last - KEY_BLOCK)
                for r in range(ROWS):
                    newest[r] -= KEY_BLOCK

            for r in range(ROWS):
                row = int32(lane // ROW_LANES + 8 * r)
                if row < count:
                    share, out = float32(1) / total[r], (first + row) * width + head * head_size
                    for block in range(BLOCKS):
                        for i in range(DIMS):
                            dim = int32(block * BLOCK + lane % ROW_LANES * DIMS + i)
                            if dim < head_size:
                                store(attended, out + dim, values[block * HELD + r * DIMS + i] * share)

    return kernel(attend_tiles)


@device_function
def cache_start(layer, num_slots, slot, num_heads, head, head_elements):
    """The element of a cache where a head of a KV slot begins."""
    return int64((layer * num_slots + slot) * num_heads + head) * head_elements
