"""inputs @ weights.T + bias for a few tokens at a time: a block for each panel of 8 features, a warp for each segment.

The kernels differ in what becomes of a sum: it is a part of q, k and v, added to the residual stream, activated, or a
logit. For batches of up to FUSED_TOKENS the layer norm in front is part of the kernel: each block normalises the rows
for itself, while its weights are on their way.
"""

import functools
from typing import Any, NamedTuple

from tinygpt.kernels.cuda.layers.elementwise import ACTIVATIONS
from tinygpt.kernels.cuda.layers.layer_norm import held_numbers, row_functions, shared_norm_functions
from tinygpt.kernels.cuda.layers.product import (
    GROUP_STEPS,
    SHARED_PAD,
    TILE_SIZE,
    TILE_TOKENS,
    WORDS,
    load_group_function,
    product_function,
    total,
)
from tinygpt.kernels.cuda.packing import OUT_TILE, SEGMENTS, STEP, STEP_SIZE
from tinygpt.kernels.cuda.runtime.block import WARP
from tinygpt.kernels.cuda.runtime.jit import device_function, kernel
from tinygpt.kernels.cuda.runtime.ptx import (
    let_next_kernel_begin,
    load_fresh,
    shared_address,
    store_bfloat16,
    wait_for_copies,
    wait_for_kernel_before,
)

from numba import cuda, float32, int32, int64, uint16, uint32  # isort: skip

LINEAR_THREADS = SEGMENTS * WARP
FUSED_TOKENS = SEGMENTS  # each of a block's warps normalises one row
NOT_FOUND = int64(0), float32(-0.0)  # where a sum goes and what it is added to, until somebody looks
# What becomes of a sum, beside the names of activations.
ADD, LOGITS, QKV = "add", "logits", "qkv"


class Weights(NamedTuple):
    """A linear layer of every layer of the model."""

    panels: Any  # layout.py: (L, features, K)
    scales: Any  # (L, num_panels * OUT_TILE) float32
    bias: Any  # (L, features) float32
    num_panels: int
    num_steps: int
    features: int


class Heads(NamedTuple):
    """Where c_attn's features go; attention.py has the layouts."""

    q: Any
    k_cache: Any
    v_cache: Any
    positions: Any  # (N,) int32
    token_slots: Any  # (N,) int32, the KV slot of each token
    num_slots: int
    padded_len: int
    num_heads: int
    head_size: int
    padded_head: int


class Norm(NamedTuple):
    """A layer norm of every layer of the model, and the rows that it is for."""

    x: Any  # (N, C) float32
    rows: Any  # (n,) int32, indices of x's rows
    weight: Any  # (L, C) float32
    bias: Any  # (L, C) float32
    epsilon: Any  # float32


def fused_shared_bytes(num_steps: int) -> int:
    """Shared memory of a launch of a kernel with its layer norm: the rows that it makes, in bfloat16."""
    return FUSED_TOKENS * (num_steps * STEP + SHARED_PAD) * 2


@functools.cache
def linear_kernel(dtype: str, tiles: int, purpose: str):
    """linear(target, inputs, weights, layer, width, sizes, which): a Weights applied to rows of inputs.

    dtype: of the weights. tiles: of 16 tokens, that a block multiplies. inputs (n, num_steps * STEP), of the family's
    type; n is sizes[which]. purpose: ADD to target (n, width) float32; LOGITS: write target (n, width) float32, without
    a bias; QKV: target is Heads; an activation's name: write what it makes of the sum to target (n, width), of the
    family's type. Grid (num_panels, ceil(n / (tiles * TILE_TOKENS))), LINEAR_THREADS threads.
    """
    # What adds to the residual stream has the fewest features, and with c_proj of the MLP the most of K.
    has_few_blocks = purpose == ADD and tiles == 1
    load_group, product = load_group_function(dtype), product_function(dtype, tiles, has_few_blocks=has_few_blocks)
    locate, find, store = _store_functions(dtype, tiles, purpose)
    words_size, partials_size = max(GROUP_STEPS * WORDS[dtype], 1), tiles * SEGMENTS * TILE_SIZE
    LOCATES_EARLY = dtype != "float32"  # whose sums fill the registers: one block more on each SM hides as much

    def linear(target, inputs, weights, layer, width, sizes, which):
        let_next_kernel_begin()
        partials, words = cuda.shared.array(partials_size, float32), cuda.local.array(words_size, uint32)
        panel, first, count = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y) * int32(tiles * TILE_TOKENS), sizes[which]
        if first >= count:
            return
        base = first_weight(weights, layer, panel)
        load_group(words, weights.panels, base, weights.num_steps)
        if LOCATES_EARLY:
            place = locate(target, weights, layer, panel)
        wait_for_kernel_before()
        own = find(target, layer, width, first, count, place) if LOCATES_EARLY else NOT_FOUND
        product(partials, words, inputs, first, count, weights.panels, base, weights.num_steps)
        if not LOCATES_EARLY:
            place = locate(target, weights, layer, panel)
        cuda.syncthreads()
        store(target, partials, place, own, weights, layer, panel, width, first, count)

    return kernel(linear)


@functools.cache
def normed_linear_kernel(dtype: str, columns: int, purpose: str):
    """linear(target, norm, weights, layer, width, sizes, which): as above, of a layer norm of up to FUSED_TOKENS rows.

    Not for float32; columns: whole steps. Grid num_panels, LINEAR_THREADS threads, fused_shared_bytes. It pays where
    blocks are few, as each makes the norm for itself.
    """
    load_group, product = load_group_function(dtype), product_function(dtype, 1, in_shared=True)
    locate, find, store = _store_functions(dtype, 1, purpose)
    load_norm, store_scaled = shared_norm_functions(columns, LINEAR_THREADS)
    load_row, normalise_row = row_functions(columns)
    held, row_bytes = held_numbers(columns), 2 * (columns + SHARED_PAD)
    words_size, partials_size = GROUP_STEPS * WORDS[dtype], SEGMENTS * TILE_SIZE

    def normed_linear(target, norm, weights, layer, width, sizes, which):
        let_next_kernel_begin()
        partials, words = cuda.shared.array(partials_size, float32), cuda.local.array(words_size, uint32)
        norm_weight = shared_address(cuda.shared.array(columns, float32, alignment=16))
        norm_bias = shared_address(cuda.shared.array(columns, float32, alignment=16))
        rows = shared_address(cuda.shared.array(0, uint16, alignment=16))
        values = cuda.local.array(held, float32)
        panel, count, thread = int32(cuda.blockIdx.x), sizes[which], int32(cuda.threadIdx.x)
        lane, row = thread % int32(WARP), thread // int32(WARP)
        base = first_weight(weights, layer, panel)
        load_group(words, weights.panels, base, weights.num_steps)
        place = locate(target, weights, layer, panel)
        load_norm(norm_weight, norm_bias, norm, layer, thread)
        wait_for_kernel_before()
        if row < count:
            load_row(values, norm.x, norm.rows[row] * columns, lane)
        own = find(target, layer, width, int32(0), count, place)
        if row < count:
            normalise_row(values, norm.epsilon, lane)
        wait_for_copies(0)
        cuda.syncthreads()
        if row < count:
            store_scaled(uint32(rows + uint32(row * row_bytes)), values, norm_weight, norm_bias, lane)
        cuda.syncthreads()
        product(partials, words, rows, int32(0), count, weights.panels, base, weights.num_steps)
        cuda.syncthreads()
        store(target, partials, place, own, weights, layer, panel, width, int32(0), count)

    return kernel(normed_linear)


@device_function
def first_weight(weights, layer, panel):
    """Where a panel begins."""
    return (int64(layer) * weights.num_panels + panel) * weights.num_steps * int32(STEP_SIZE)


@functools.cache
def _store_functions(dtype: str, tiles: int, purpose: str):
    """(locate_own, find_own, store)

    locate_own(target, weights, layer, panel): `place` of the one feature whose sums a thread finishes. Where registers
        allow, it is asked for before the sums are made: scales and biases come from far away.
    find_own(target, layer, width, first, count, place): where the thread's one sum goes and what it is added to, if
        there is one tile: asked for before the sums are made, too.
    store(target, partials, place, own, weights, layer, panel, width, first, count): finish each sum of a block's tiles.
    """
    ending, IS_ONE = ending_of(dtype, purpose), tiles == 1 and dtype != "float32"
    locate, find, finish, read, put = ending.locate, ending.find, ending.finish, ending.read, ending.put

    @device_function
    def locate_own(target, weights, layer, panel):
        feature = panel * int32(OUT_TILE) + int32(cuda.threadIdx.x) % int32(OUT_TILE)
        return locate(target, weights, layer, min(int32(feature), int32(weights.features - int32(1))))

    @device_function
    def find_own(target, layer, width, first, count, place):
        if not IS_ONE:
            return NOT_FOUND
        token = min(int32(first + int32(cuda.threadIdx.x) // int32(OUT_TILE)), int32(count - int32(1)))
        at = find(target, layer, width, token, place)
        return at, read(target, at)

    def store(target, partials, place, own, weights, layer, panel, width, first, count):
        for index in range(int32(cuda.threadIdx.x), int32(tiles * TILE_SIZE), int32(LINEAR_THREADS)):
            token, feature = first + index // int32(OUT_TILE), panel * int32(OUT_TILE) + index % int32(OUT_TILE)
            if token < count and feature < weights.features:
                value = finish(total(partials, index // int32(TILE_SIZE), index % int32(TILE_SIZE)), place)
                at, before = own
                if not IS_ONE:
                    at = find(target, layer, width, token, place)
                    before = read(target, at)
                put(target, at, before + value, place)

    return locate_own, find_own, device_function(store)


class Ending(NamedTuple):
    """What becomes of a sum, in steps; put(..., read(...) + finish(...), ...) is all of them."""

    locate: Any  # locate(target, weights, layer, feature): place, whatever depends on the feature alone
    find: Any  # find(target, layer, width, token, place): the element of the target that the sum goes to
    finish: Any  # finish(value, place): the sum, scaled, biased and activated
    read: Any  # read(target, at): what it is added to
    put: Any  # put(target, at, value, place)


@functools.cache
def ending_of(dtype: str, purpose: str) -> Ending:
    is_float32 = dtype == "float32"
    if purpose == QKV:
        locate, find, put = (function(is_float32) for function in (_locate_in_heads, _find_in_heads, _put_in_heads))
        return Ending(locate, find, _biased, _nothing, put)
    if purpose == LOGITS:
        return Ending(_locate_logit, _find, _biased, _nothing, _put_float32)
    if purpose == ADD:
        return Ending(_locate, _find, _biased, _read, _put_float32)
    activation = ACTIVATIONS[purpose]

    @device_function
    def activated(value, place):
        return activation(_biased(value, place))

    return Ending(_locate, _find, activated, _nothing, _put_float32 if is_float32 else _put_bfloat16)


@device_function
def _locate(target, weights, layer, feature):
    """(scale, bias, part, offset); part and offset tell where a token has this feature."""
    return _scale(weights, layer, feature), weights.bias[layer * weights.features + feature], 0, feature


@device_function
def _locate_logit(target, weights, layer, feature):
    return _scale(weights, layer, feature), float32(0), 0, feature


@device_function
def _scale(weights, layer, feature):
    return weights.scales[layer * weights.num_panels * int32(OUT_TILE) + feature]


@device_function
def _biased(value, place):
    return cuda.fma(value, place[0], place[1])  # rounded once in each kernel, not where the compiler likes to


@device_function
def _find(target, layer, width, token, place):
    return int64(token) * width + place[3]


@device_function
def _nothing(target, at):
    return float32(-0.0)  # unlike 0, it leaves whatever is added to it as it is


@device_function
def _read(target, at):
    return load_fresh(target, at)


@device_function
def _put_float32(target, at, value, place):
    target[at] = value


@device_function
def _put_bfloat16(target, at, value, place):
    store_bfloat16(target, at, value)


def _locate_in_heads(is_float32: bool):
    def locate(heads, weights, layer, feature):
        """Part 0, 1 or 2 of q, k and v, and the offset from the first number of a token there."""
        scale, bias, _, _ = _locate(heads, weights, layer, feature)
        columns = uint32(heads.num_heads * heads.head_size)
        part = int32(uint32(feature) // columns)
        c = uint32(uint32(feature) - uint32(part) * columns)
        head = int32(c // uint32(heads.head_size))
        d = int32(c) - head * heads.head_size
        if part == 0:
            return scale, bias, part, head * heads.padded_head + d
        if part == 2 and not is_float32:  # values of two positions lie side by side
            d *= 2
        return scale, bias, part, head * heads.padded_len * heads.padded_head + d

    return device_function(locate)


def _find_in_heads(is_float32: bool):
    def find(heads, layer, width, token, place):
        part, offset = place[2], place[3]
        if part == 0:
            return int64(token) * (heads.num_heads * heads.padded_head) + offset
        position = heads.positions[token]
        slot = int64(layer * heads.num_slots + heads.token_slots[token])
        at = slot * (heads.num_heads * heads.padded_len * heads.padded_head) + position * heads.padded_head + offset
        if part == 2 and not is_float32:
            at += position % 2 * (1 - heads.padded_head)
        return at

    return device_function(find)


def _put_in_heads(is_float32: bool):
    put_number = _put_float32 if is_float32 else _put_bfloat16

    def put(heads, at, value, place):
        if place[2] == 0:
            put_number(heads.q, at, value, place)
        elif place[2] == 1:
            put_number(heads.k_cache, at, value, place)
        else:
            put_number(heads.v_cache, at, value, place)

    return device_function(put)
