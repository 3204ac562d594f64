"""What the persistent kernel does between its linear layers, and the barrier that parts its phases.

What one block writes and another reads within the kernel is loaded by load_fresh, load_global or copy_async, past the
L1 cache; what nothing writes to (weights, biases, norms, the KV cache's earlier positions) as anywhere.
"""

import functools
from typing import Any, NamedTuple

from tinygpt.kernels.cuda.layers.attention import cache_start, chunk_function, prefetch_function
from tinygpt.kernels.cuda.layers.attention_products import CHUNK, bfloat16_products
from tinygpt.kernels.cuda.layers.embedding import embed_row_function
from tinygpt.kernels.cuda.layers.layer_norm import held_numbers, row_functions, shared_norm_functions
from tinygpt.kernels.cuda.layers.linear import LINEAR_THREADS
from tinygpt.kernels.cuda.layers.product import SHARED_PAD
from tinygpt.kernels.cuda.packing.layout import PANEL
from tinygpt.kernels.cuda.persistent.linear import thread_and_block
from tinygpt.kernels.cuda.runtime.block import block_greatest
from tinygpt.kernels.cuda.runtime.jit import device_function
from tinygpt.kernels.cuda.runtime.ptx import (
    load_acquire,
    load_fresh,
    load_global,
    signal_arrival,
    wait_for_copies,
)
from tinygpt.kernels.cuda.runtime.warp import WARP
from tinygpt.kernels.cuda.sampling.keys import token_of

from numba import cuda, float32, int32, int64, uint32  # isort: skip

WARPS = LINEAR_THREADS // WARP


class Barrier(NamedTuple):
    """Where the blocks of a launch meet."""

    arrivals: Any  # (1,) int32, how many blocks have arrived in all; 0 before the launch
    failed: Any  # (1,) int32, becomes 1 where a block has waited for too long
    max_spins: int


class Tokens(NamedTuple):
    """Of the step that a block is at, shared: ids, positions and KV slots, (FUSED_TOKENS,) int32 each."""

    ids: Any
    positions: Any
    slots: Any


class Embedding(NamedTuple):
    wte: Any  # Weights
    wpe: Any  # (n_positions, C) float32
    embeds: Any  # (E, C) float32


@device_function
def signal(barrier):
    """Say that this block has finished its phase. Then it may still do what needs no other block."""
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        signal_arrival(barrier.arrivals, 0)


@device_function
def all_arrive(barrier, goal):
    """Wait for `goal` arrivals since the launch, and for the thread's copies; False: in vain, the block must return.

    It gives up after max_spins looks, so that a bug cannot hang the GPU; then the others wait in vain, too.
    """
    late, spins = int32(0), int32(0)
    wait_for_copies(0)
    if cuda.threadIdx.x == 0:
        while late == 0 and load_acquire(barrier.arrivals, 0) < uint32(goal):
            spins += int32(1)
            if spins > barrier.max_spins:
                barrier.failed[0] = late = int32(1)
    return cuda.syncthreads_or(late) == 0


@device_function
def find_tokens(tokens, token_ids, positions, token_slots, count):
    """Bring what is known of the tokens to shared memory, where it stays: positions grow by 1 with each step."""
    thread = int32(cuda.threadIdx.x)
    if thread < count:
        tokens.ids[thread], tokens.positions[thread] = token_ids[thread], positions[thread]
        tokens.slots[thread] = token_slots[thread]
    cuda.syncthreads()


@functools.cache
def norm_functions(columns: int):
    """(load_norm, normalise) of rows of C = columns numbers, a multiple of 64.

    load_norm(weight, bias, weights, layer): ask for a layer's NormWeights, into the shared addresses weight and bias.
    normalise(rows, x, weight, bias, epsilon, count): the shared address rows, uint16 (count, C + SHARED_PAD), = layer
        norm of x (count, C), a warp for each row.
    """
    held, row_bytes = held_numbers(columns), 2 * (columns + SHARED_PAD)
    load_row, normalise_row = row_functions(columns)
    load_all, store_scaled = shared_norm_functions(columns, LINEAR_THREADS)

    @device_function
    def load_norm(weight, bias, weights, layer):
        thread, _, _ = thread_and_block()
        load_all(weight, bias, weights, layer, thread)

    @device_function
    def normalise(rows, x, weight, bias, epsilon, count):
        thread, _, _ = thread_and_block()
        lane, row = thread % int32(WARP), thread // int32(WARP)
        if row < count:
            values = cuda.local.array(held, float32)
            load_row(values, x, row * columns, lane)
            normalise_row(values, epsilon, lane)
            store_scaled(uint32(rows + uint32(row * int32(row_bytes))), values, weight, bias, lane)
        cuda.syncthreads()

    return load_norm, normalise


@functools.cache
def attention_functions(size: int):
    """(prefetch_keys, attend): the block's share of a layer's attention. size: Dp.

    prefetch_keys(heads, layer, count, max_chunks): its keys and values on their way to L2.
    attend(attended, width, partials, heads, merges, layer, count, max_chunks, scale): attended (N, width), as
        attend_chunks_kernel: no barrier, and no block reads more than it has to.

    A warp takes a chunk of a token and head; the first warp of each block comes first.
    """
    attend_chunk = chunk_function(bfloat16_products(size, load_global), size)
    prefetch_chunk = prefetch_function(size, "bfloat16")

    @device_function
    def item_of(item, heads, layer, count):
        """(head, n, chunk, last key of the chunk that counts, element of the caches where it begins)"""
        head, of_head = item % heads.num_heads, item // heads.num_heads
        n, chunk = of_head % count, of_head // count
        slot, head_elements = heads.token_slots[n], heads.padded_len * size
        start = cache_start(layer, heads.num_slots, slot, heads.num_heads, head, head_elements) + chunk * (CHUNK * size)
        return head, n, chunk, int32(heads.positions[n] - chunk * CHUNK), start

    @device_function
    def prefetch_keys(heads, layer, count, max_chunks):
        thread, block, blocks = thread_and_block()
        items = count * heads.num_heads * max_chunks
        if thread % WARP == 0:
            for item in range(block + blocks * (thread // int32(WARP)), items, blocks * int32(WARPS)):
                _, _, _, last, start = item_of(int32(item), heads, layer, count)
                if last >= 0:
                    prefetch_chunk(heads.k_cache, heads.v_cache, start, last)

    @device_function
    def attend(attended, width, partials, heads, merges, layer, count, max_chunks, scale):
        thread, block, blocks = thread_and_block()
        q, k_cache, v_cache, num_heads = heads.q, heads.k_cache, heads.v_cache, heads.num_heads
        items = count * num_heads * max_chunks
        for item in range(block + blocks * (thread // int32(WARP)), items, blocks * int32(WARPS)):
            head, n, chunk, last, start = item_of(int32(item), heads, layer, count)
            if last >= 0:
                where = start, last, n, num_heads, head, chunk, max_chunks
                more = scale, heads.head_size, width
                attend_chunk(attended, merges, partials, q, k_cache, v_cache, *where, *more)

    return prefetch_keys, attend


@functools.cache
def embed_tokens_function(dtype: str):
    """embed_tokens(x, embedding, tokens, columns, count): x (N, C), a block for each token."""
    embed_row = embed_row_function(dtype)

    @device_function
    def embed_tokens(x, embedding, tokens, columns, count):
        e, wte = embedding, embedding.wte
        for n in range(int32(cuda.blockIdx.x), count, int32(cuda.gridDim.x)):
            token, position = tokens.ids[n], tokens.positions[n]
            embed_row(x, n, token, position, e.embeds, wte.panels, wte.scales, e.wpe, columns, wte.num_steps)

    return embed_tokens


@device_function
def store_keys(keys, key, count):
    """keys (N, blocks) int64: what `greatest` returns."""
    thread, block, blocks = thread_and_block()
    if thread % PANEL == 0 and thread // PANEL < count:
        keys[thread // PANEL * blocks + block] = key


@device_function
def choose(tokens, keys, strips, token_ids, positions, history, first, count):
    """The next step's tokens, as take_greatest and advance; a block finds those that it will embed.

    keys: of store_keys. strips: shared, MAX_WARPS int64. history[first:] (N,) int32: the tokens, -1 where there is
    none; then the sequence goes on with token 0. token_ids and positions (N,) int32.
    """
    thread, block, blocks = thread_and_block()
    if thread < count:
        tokens.positions[thread] += int32(1)
    for n in range(block, count, blocks):
        key = int64(-1)
        for i in range(thread, blocks, int32(LINEAR_THREADS)):
            key = max(key, load_fresh(keys, int32(n) * blocks + int32(i)))
        token = int32(token_of(block_greatest(key, strips)))
        if thread == 0:
            history[first + n] = token
            tokens.ids[n] = token_ids[n] = max(token, int32(0))
            positions[n] = tokens.positions[n]
    cuda.syncthreads()
