"""inputs @ weights.T + bias for a few tokens at a time: a block for each panel of 8 features, a warp for each segment.

Bandwidth, latency and a short kernel's instructions limit decode. A warp asks for its first weights, 16 bytes a lane,
before it waits for its inputs, and for the next ones as soon as it has used some. Addresses are int64 bases plus
constants, indices unsigned: a signed index costs three instructions more. Sums over K have one order: a token's bits do
not depend on its batch. Up to FUSED_TOKENS rows are normalized in each block.
"""

import functools
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint32

from ..jit import (
    ALL_LANES,
    WARP,
    bits_to_float32,
    device_function,
    four,
    kernel,
    let_next_kernel_begin,
    load_cached,
    load_global,
    load_shared,
    load_weights,
    shared_address,
    wait_for_copies,
    wait_for_kernel_before,
)
from ..params import DTYPES, OUT_TILE, SEGMENTS, STEP, STEP_SIZE, Dtype
from .epilogue import LOGITS, epilogue_of
from .rows import held_numbers, row_functions, shared_norm_functions

ROWS = 8  # tokens of an octet, half of the rows of one mma
SUMS = ROWS * OUT_TILE  # of an octet
ROW_TILE = 16  # the rows of one mma
SHARED_PAD = 32  # numbers of 16 bits between two rows in shared memory: 8 rows lie in different banks
HALF = STEP // 2  # of K: what a lane's load of inputs belongs to
HELD_OCTETS = 12  # halves of steps whose inputs a lane holds, times octets
LINEAR_THREADS = SEGMENTS * WARP
FUSED_TOKENS = SEGMENTS  # each warp of a block normalizes one row
TILE_BOUNDS = 3  # of a tile of rows: its expert, its first row, and the row after its last


class Norm(NamedTuple):
    x: Any  # (N, C) float32
    rows: Any  # (n,) int32, indices of x's rows
    weight: Any  # (L, C) float32
    bias: Any  # (L, C) float32
    epsilon: Any  # float32


def fused_shared_bytes(columns: int) -> int:
    """Return what a launch of normed_linear_kernel asks for: the norm's weight and bias, then rows of 16 bits."""
    return 8 * columns + 2 * FUSED_TOKENS * (columns + SHARED_PAD)


def fused_block_bytes(columns: int) -> int:
    """Return a block's shared memory in normed_linear_kernel, with its array of a fixed size."""
    return fused_shared_bytes(columns) + 4 * SEGMENTS * SUMS


def max_octets(dtype: str) -> int:
    """Return the most octets of tokens that a block of `linear` takes."""
    return 8 if DTYPES[dtype].numbers.has_mma else 1


def steps_ahead(dtype: str, octets: int, num_steps: int) -> int:
    """Return how many steps of weights a warp asks for at once: all of its segment if registers allow it."""
    if not DTYPES[dtype].numbers.has_mma:
        return 1
    return min(-(-num_steps // SEGMENTS), 6 if octets == 1 else 2)


@functools.cache
def linear_kernel(dtype: str, octets: int, epilogue: str, ahead: int, has_tiles: bool = False):
    """target (n, width), or Heads for QKV, of inputs (n, num_steps * STEP); n: sizes[row_kind].

    Grid (blocks, n / (octets * ROWS)). Blocks share the panels of LOGITS; otherwise each has one. ahead: steps_ahead.
    has_tiles: `sizes` are tiles of experts.py instead, and an expert is a layer after `layer`. Grid (blocks, tiles).
    """
    load_words = load_words_function(dtype, ahead)
    product = product_function(dtype, octets, ahead)
    locate, find, store = _store_functions(dtype, octets, epilogue)
    words_size = ahead * DTYPES[dtype].words
    partials_size = octets * SEGMENTS * SUMS
    HAS_MANY = epilogue == LOGITS

    def linear(target, inputs, weights, layer, width, sizes, row_kind):
        let_next_kernel_begin()
        partials = cuda.shared.array(partials_size, float32)
        words = cuda.local.array(words_size, uint32)
        panel = cuda.blockIdx.x
        first = int32(cuda.blockIdx.y * (octets * ROWS))
        if has_tiles:
            wait_for_kernel_before()
            row_kind = int32(cuda.blockIdx.y * TILE_BOUNDS + 2)
            first = sizes[uint32(row_kind - 1)]
            layer = layer + sizes[uint32(row_kind - 2)]
            if first >= sizes[uint32(row_kind)]:
                return
        load_words(words, weights, layer, panel)
        count = sizes[uint32(row_kind)]
        place = locate(target, weights, layer, panel)
        wait_for_kernel_before()
        if first >= count:
            return
        own = find(target, layer, width, first, count, place)
        while True:
            product(partials, words, inputs, first, count, weights, layer, panel)
            following = int32(panel + cuda.gridDim.x)
            has_more = HAS_MANY and following < weights.num_panels
            if has_more:
                load_words(words, weights, layer, following)
            cuda.syncthreads()
            store(target, partials, place, own, weights, layer, panel, width, first, count)
            if not has_more:
                return
            cuda.syncthreads()
            panel = following
            place = locate(target, weights, layer, following)
            own = find(target, layer, width, first, count, place)

    return kernel(linear)


@functools.cache
def normed_linear_kernel(dtype: str, columns: int, epilogue: str):
    """As linear_kernel, for up to FUSED_TOKENS rows of a Norm of 64 n columns, not in float32. Grid num_panels."""
    ahead = steps_ahead(dtype, 1, columns // STEP)
    load_words = load_words_function(dtype, ahead)
    product = product_function(dtype, 1, ahead, in_shared=True)
    locate, find, store = _store_functions(dtype, 1, epilogue)
    load_norm, store_scaled = shared_norm_functions(DTYPES[dtype].numbers, columns, LINEAR_THREADS)
    load_row, normalize_row = row_functions(columns)
    held = held_numbers(columns)
    row_bytes = 2 * (columns + SHARED_PAD)
    words_size = ahead * DTYPES[dtype].words
    partials_size = SEGMENTS * SUMS

    def normed_linear(target, norm, weights, layer, width, sizes, row_kind):
        let_next_kernel_begin()
        partials = cuda.shared.array(partials_size, float32)
        words = cuda.local.array(words_size, uint32)
        # Arrays of a fixed size have 48 KiB at most, in all.
        norm_weight = shared_address(cuda.shared.array(0, float32, alignment=16))
        norm_bias = norm_weight + 4 * columns
        rows = norm_bias + 4 * columns
        values = cuda.local.array(held, float32)
        panel = cuda.blockIdx.x
        (lane, row) = _lane_and_warp()
        load_words(words, weights, layer, panel)
        load_norm(norm_weight, norm_bias, norm, layer, cuda.threadIdx.x)
        count = sizes[uint32(row_kind)]
        place = locate(target, weights, layer, panel)
        wait_for_kernel_before()
        if row < count:
            load_row(values, norm.x, norm.rows[row] * columns, lane)
        own = find(target, layer, width, 0, count, place)
        if row < count:
            normalize_row(values, norm.epsilon, lane)
        wait_for_copies(0)
        cuda.syncthreads()
        if row < count:
            store_scaled(rows + row * row_bytes, values, norm_weight, norm_bias, lane)
        cuda.syncthreads()
        product(partials, words, rows, 0, count, weights, layer, panel)
        cuda.syncthreads()
        store(target, partials, place, own, weights, layer, panel, width, 0, count)

    return kernel(normed_linear)


@device_function
def _lane_and_warp():
    thread = uint32(cuda.threadIdx.x)
    return int32(thread % WARP), int32(thread // WARP)


@device_function
def first_weight(weights, layer, panel):
    return int32((layer * weights.num_panels + panel) * weights.num_steps) * STEP_SIZE


@device_function
def segment_start(segment, num_steps):
    return int32(uint32(segment * num_steps) // SEGMENTS)


@device_function
def _segment_of_warp(weights):
    """Return the lane, the warp's segment, the segment's first step, and the step after its last."""
    lane, segment = _lane_and_warp()
    start = segment_start(segment, weights.num_steps)
    return lane, segment, start, segment_start(segment + 1, weights.num_steps)


@functools.cache
def _store_functions(dtype: str, octets: int, epilogue: str):
    """Return (locate_own, find_own, store).

    locate_own: the `place` of the feature whose sums a thread finishes
    find_own: if a thread finishes one sum, its index in the target, and the number before it
    """
    locate, find, finish, read, put = epilogue_of(dtype, epilogue)
    num_sums = octets * SUMS
    turns = -(-octets * SUMS // LINEAR_THREADS)
    IS_ONE = turns == 1

    @device_function
    def locate_own(target, weights, layer, panel):
        feature = int32(panel * OUT_TILE + uint32(cuda.threadIdx.x) % OUT_TILE)
        return locate(target, weights, layer, min(feature, int32(weights.features - 1)))

    @device_function
    def find_own(target, layer, width, first, count, place):
        if not IS_ONE:
            return 0, float32(-0.0)
        token = min(int32(first + uint32(cuda.threadIdx.x) // OUT_TILE), int32(count - 1))
        at = find(target, layer, width, token, place)
        return at, read(target, at)

    def store(target, partials, place, own, weights, layer, panel, width, first, count):
        for turn in range(turns):
            index = uint32(cuda.threadIdx.x + turn * LINEAR_THREADS)
            row = index // OUT_TILE
            column = index % OUT_TILE
            token = int32(first + row)
            feature = int32(panel * OUT_TILE + column)
            if index < num_sums and token < count and feature < weights.features:
                value = finish(_total(partials, index), place)
                at, before = own
                if not IS_ONE:
                    at = find(target, layer, width, token, place)
                    before = read(target, at)
                put(target, at, before + value, place)

    return locate_own, find_own, device_function(store)


@device_function
def _total(partials, index):
    """Return the sum over segments; index: token * OUT_TILE + feature."""
    start = uint32(index // uint32(SUMS) * (SEGMENTS * SUMS) + index % uint32(SUMS))
    value = partials[start]
    for segment in range(1, SEGMENTS):
        value += partials[start + segment * SUMS]
    return value


@functools.cache
def load_words_function(dtype: str, ahead: int):
    """Return the function that asks for a warp's first `ahead` steps of a panel."""
    row = DTYPES[dtype]
    load_step = _load_step_function(row)
    words = row.words
    first_lane_weight = _first_lane_weight_function(row)

    def load_words(held, weights, layer, panel):
        (lane, _, step, stop) = _segment_of_warp(weights)
        at = first_lane_weight(weights, layer, panel, step, lane)
        for i in range(ahead):
            if int32(step + i) < stop:
                load_step(held, i * words, weights.panels, at + i * STEP_SIZE)

    return device_function(load_words)


@functools.cache
def _first_lane_weight_function(dtype: Dtype):
    lane_size = dtype.lane_size

    def first_lane_weight(weights, layer, panel, step, lane):
        return first_weight(weights, layer, panel) + int32(step * STEP_SIZE + lane * lane_size)

    return device_function(first_lane_weight)


@functools.cache
def _load_step_function(dtype: Dtype):
    loads = dtype.words // 4
    load_size = WARP * dtype.lane_size

    def load_step(held, first, panels, at):
        for part in range(loads):
            loaded = load_weights(panels, at + part * load_size)
            for i in range(4):
                held[first + part * 4 + i] = loaded[i]

    return device_function(load_step)


@functools.cache
def product_function(dtype: str, octets: int, ahead: int, in_shared: bool = False):
    """Multiply some octets of tokens by a panel.

    partials: shared float32 (octets, SEGMENTS, ROWS, OUT_TILE), of which a warp writes one segment
    words: local (ahead steps,), the first weights. inputs: an address if in_shared
    """
    row = DTYPES[dtype]
    return _mma_product(row, octets, ahead, in_shared) if row.numbers.has_mma else _fma_product(row)


def _mma_product(dtype: Dtype, octets: int, ahead: int, in_shared: bool):
    """Multiply on tensor cores."""
    load_step = _load_step_function(dtype)
    first_lane_weight = _first_lane_weight_function(dtype)
    mma = dtype.numbers.mma
    expand = dtype.expand
    IS_PACKED = expand is not None
    step_words = dtype.words
    tiles = -(-octets // 2)
    IS_PAIRED = octets > 1
    most = 1 if in_shared else max(HELD_OCTETS // octets, 1)
    # Of a step, whose inputs are loaded together.
    halves = max(n for n in range(1, most + 1) if 2 * ahead % n == 0)
    turns = 2 * ahead // halves
    held_words = halves * octets * 4
    sums_size = tiles * 4
    row_pad, row_type = (SHARED_PAD, uint32) if in_shared else (0, int64)

    @device_function
    def load_input(inputs, at):
        return load_shared(inputs + at * 2) if in_shared else load_global(inputs, at)

    @device_function
    def weights_of(words, ahead, half):
        if IS_PACKED:
            first = expand(words[ahead * 4 + half * 2])
            second = expand(words[ahead * 4 + half * 2 + 1])
            return first[0], first[1], second[0], second[1]
        return four(words, (ahead * 2 + half) * 4)

    @device_function
    def multiply(sums, held, i, w):
        for tile in range(tiles):
            a, s = (i * octets + 2 * tile) * 4, tile * 4
            low = (held[a], uint32(0), held[a + 1], uint32(0))
            high = (held[a + 2], uint32(0), held[a + 3], uint32(0))
            if IS_PAIRED:
                b = a + 4
                low = (held[a], held[b], held[a + 1], held[b + 1])
                high = (held[a + 2], held[b + 2], held[a + 3], held[b + 3])
            c = mma(low, (w[0], w[1]), four(sums, s))
            c = mma(high, (w[2], w[3]), c)
            for j in range(4):
                sums[s + j] = c[j]

    def product(partials, words, inputs, first, count, weights, layer, panel):
        (lane, segment, step, stop) = _segment_of_warp(weights)
        g = lane // 4
        q = int32(uint32(lane) % uint32(4))
        num_steps = weights.num_steps
        further = first_lane_weight(weights, layer, panel, step, lane) + ahead * STEP_SIZE
        held = cuda.local.array(held_words, uint32)
        sums = cuda.local.array(sums_size, float32)
        rows = cuda.local.array(octets, row_type)
        for i in range(sums_size):
            sums[i] = float32(0)
        for i in range(held_words):
            held[i] = 0
        for octet in range(octets):
            token = min(int32(first + octet * ROWS + g), int32(count - 1))
            row = int32(token * int32(num_steps * STEP + row_pad) + step * STEP + q * 8)
            rows[octet] = row_type(row)
        while step < stop:
            for turn in range(turns):
                for i in range(halves):
                    half = turn * halves + i
                    if int32(step + half // 2) < stop:
                        for octet in range(octets):
                            if octet == 0 or int32(first + octet * ROWS) < count:
                                loaded = load_input(inputs, row_type(rows[octet] + row_type(half * HALF)))
                                for j in range(4):
                                    held[(i * octets + octet) * 4 + j] = loaded[j]
                for i in range(halves):
                    half = turn * halves + i
                    if int32(step + half // 2) < stop:
                        multiply(sums, held, i, weights_of(words, half // 2, half % 2))
                        if half % 2 == 1 and int32(step + half // 2 + ahead) < stop:
                            load_step(
                                words, half // 2 * step_words, weights.panels, further + half // 2 * STEP_SIZE
                            )
            step = int32(step + ahead)
            further = further + ahead * STEP_SIZE
            for octet in range(octets):
                rows[octet] = row_type(rows[octet] + row_type(ahead * STEP))
        start = segment * SUMS + g * OUT_TILE + q * 2
        for octet in range(octets):
            at = uint32(start + octet * SEGMENTS * SUMS)
            s = octet * 2
            partials[at] = sums[s]
            partials[uint32(at + 1)] = sums[s + 1]

    return device_function(product)


def _fma_product(dtype: Dtype):
    """Multiply one octet on ordinary units. On an H200, two octets take up to 1.4 times as long."""
    load_step = _load_step_function(dtype)
    first_lane_weight = _first_lane_weight_function(dtype)
    quarter = STEP // 4

    @device_function
    def add_products(sums, words, inputs, first, count, num_steps, k):
        for t in range(ROWS):
            if t == 0 or int32(first + t) < count:
                row = int32((first + t) * num_steps) * STEP + k
                for part in range(4):
                    x = load_cached(inputs, row + part * quarter)
                    for i in range(4):
                        weight = bits_to_float32(words[part * 4 + i])
                        sums[t] = cuda.fma(weight, bits_to_float32(x[i]), sums[t])

    def product(partials, words, inputs, first, count, weights, layer, panel):
        (lane, segment, step, stop) = _segment_of_warp(weights)
        g = uint32(lane) // 4
        q = lane % 4
        num_steps = weights.num_steps
        at = first_lane_weight(weights, layer, panel, step, lane)
        sums = cuda.local.array(ROWS, float32)
        for t in range(ROWS):
            sums[t] = float32(0)
        while step < stop:
            k = int64(int32(step * STEP + q * 4))
            step = int32(step + 1)
            at = at + STEP_SIZE
            add_products(sums, words, inputs, first, count, num_steps, k)
            if step < stop:
                load_step(words, 0, weights.panels, at)
        for t in range(ROWS):
            if t == 0 or int32(first + t) < count:
                value = sums[t]
                value += cuda.shfl_xor_sync(ALL_LANES, value, 1)
                value += cuda.shfl_xor_sync(ALL_LANES, value, 2)
                if q == t % 4:
                    partials[uint32(segment * SUMS + g + int32(t * OUT_TILE))] = value

    return device_function(product)
