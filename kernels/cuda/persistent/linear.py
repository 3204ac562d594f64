"""Linear layers within the persistent kernel: a warp's weights come through a ring in shared memory, ahead of need.

Weights do not depend on activations, so they need not wait for a barrier: a warp asks for its first RING_STEPS steps
of a phase before it waits for the phase to begin, and from then on for another one with each that it multiplies. A
lane reads back only what it has copied itself, so that the ring needs no barrier either. 64 KB are under way in each
multiprocessor, twice what its share of the bandwidth takes at a latency of 1 us. (A queue in registers would be half
as long, and could not turn without waiting for what is under way.) The first panels of a phase are brought to the L2
cache one phase earlier still.

The products are those of product.py, in the same order, for up to FUSED_TOKENS tokens: the same bits.
"""

import functools
from dataclasses import dataclass
from typing import Any

from tinygpt.kernels.cuda.layers.linear import FUSED_TOKENS, LINEAR_THREADS, LOGITS, ending_of, first_weight
from tinygpt.kernels.cuda.layers.product import SHARED_PAD, TILE_SIZE, WORDS, segment_start, total
from tinygpt.kernels.cuda.packing.layout import PANEL, SEGMENTS, STEP, STEP_SIZE
from tinygpt.kernels.cuda.runtime.jit import device_function
from tinygpt.kernels.cuda.runtime.ptx import (
    commit_copies,
    copy_async,
    int8_to_bfloat16,
    load_shared,
    mma_bfloat16,
    opaque,
    prefetch,
    prefetch_run,
    wait_for_copies,
)
from tinygpt.kernels.cuda.runtime.warp import ALL_LANES, WARP
from tinygpt.kernels.cuda.sampling.keys import greatest_key

from numba import cuda, float32, int32, int64, uint32  # isort: skip

RING_STEPS = {"bfloat16": 8, "int8": 16}
RING_BYTES = 64 << 10  # of all warps
PREFETCHED_BYTES = 64 << 10  # of a block in a phase
PARTIALS_SIZE = SEGMENTS * TILE_SIZE
SUMS_SIZE = 2 * PARTIALS_SIZE  # of one panel and the next
ENDING = 2 * PANEL  # numbers of a panel's scales and biases
RESULTS = FUSED_TOKENS * PANEL  # of a panel, each finished by one thread


@device_function
def thread_and_block():
    """(thread, block, blocks), which the compiler must not know.

    It would keep what follows from them for all phases in registers at once, more than there are. Nor may it know how
    long a loop is that it would unroll: the code is to fit in its cache.
    """
    thread, block = opaque(int32(cuda.threadIdx.x)), opaque(int32(cuda.blockIdx.x))
    return thread, block, opaque(int32(cuda.gridDim.x))


@dataclass(frozen=True)
class Ring:
    """Device functions for weights of one dtype. A cursor (panel, step, slot) is where the next copy comes from and to.

    address(memory): where the lane's part of the ring begins, of RING_BYTES at the shared address `memory`.
    fill(ring, weights, layer): ask for the first steps of the block's panels; the cursor.
    multiply(sums, buffer, ring, cursor, rows, count, weights, layer): the warp's part of the sums of the panel that
        the ring is at, into the first or second half of `sums`; the new cursor. rows: a shared address, of inputs
        (count, num_steps * STEP) in bfloat16 with SHARED_PAD numbers after each row.
    prefetch_panels(weights, layer, has_bias): the block's first panels on their way to L2.
    prefetch_next(weights, layer, panel): the same for the one as far ahead of `panel`.
    """

    address: Any
    fill: Any
    multiply: Any
    prefetch_panels: Any
    prefetch_next: Any


@functools.cache
def ring_of(dtype: str) -> Ring:
    is_int8, loads = dtype == "int8", WORDS[dtype] // 4
    depth, item_bytes = RING_STEPS[dtype], 1 if is_int8 else 2
    pending, step_bytes, load_items = depth - 1, loads * WARP * 16, 16 // item_bytes

    @device_function
    def address(memory):
        thread = int32(cuda.threadIdx.x)
        warp, lane = thread // int32(WARP), thread % int32(WARP)
        return uint32(memory + uint32(warp * int32(depth * step_bytes) + lane * int32(16)))

    @device_function
    def steps_of(thread, weights):
        """The warp's first step of a panel, and the one after its last."""
        segment = thread // int32(WARP)
        start = segment_start(segment, weights.num_steps)
        return int32(start), int32(segment_start(segment + int32(1), weights.num_steps))

    @device_function
    def feed(ring, cursor, start, stop, lane, blocks, weights, layer):
        """Ask for one step and move on: to the next panel of the block after the warp's last step of one."""
        panel, step, slot = cursor
        if start < stop and panel < weights.num_panels:
            base = first_weight(weights, layer, panel) + step * int32(STEP_SIZE) + lane * int32(load_items)
            to = uint32(ring + uint32(slot * int32(step_bytes)))
            for part in range(loads):
                copy_async(uint32(to + uint32(part * (WARP * 16))), weights.panels, base + part * (WARP * load_items))
        commit_copies()
        step += int32(1)
        if step >= stop:
            step, panel = start, int32(panel + blocks)
        return panel, step, int32(slot + int32(1) if slot < depth - 1 else 0)

    @device_function
    def fill(ring, weights, layer):
        thread, block, blocks = thread_and_block()
        start, stop = steps_of(thread, weights)
        cursor = block, start, int32(0)
        left = int32(depth)
        while left > 0:
            cursor = feed(ring, cursor, start, stop, thread % int32(WARP), blocks, weights, layer)
            left = opaque(left - int32(1))
        return cursor

    @device_function
    def weights_of(place, half):
        """A lane's 8 weights of half a step, as bfloat16."""
        if is_int8:
            words = load_shared(place)
            first, second = int8_to_bfloat16(words[half * 2]), int8_to_bfloat16(words[half * 2 + 1])
            return first[0], first[1], second[0], second[1]
        return load_shared(uint32(place + uint32(half * (WARP * 16))))

    @device_function
    def multiply(sums, buffer, ring, cursor, rows, count, weights, layer):
        thread, _, blocks = thread_and_block()
        lane, zero = thread % int32(WARP), uint32(0)
        g, q = lane // int32(4), lane % int32(4)
        row = uint32(rows + uint32((g * (weights.num_steps * int32(STEP) + int32(SHARED_PAD)) + q * int32(8)) * 2))
        start, stop = steps_of(thread, weights)
        c = (float32(0), float32(0), float32(0), float32(0))
        step = start
        while step < opaque(stop):
            wait_for_copies(pending)
            place = uint32(ring + uint32(cursor[2] * int32(step_bytes)))
            for half in range(2):
                w, a = weights_of(place, half), (zero, zero, zero, zero)
                if g < count:
                    a = load_shared(uint32(row + uint32(step * int32(STEP * 2) + half * 64)))
                c = mma_bfloat16((a[0], zero, a[1], zero), (w[0], w[1]), c)
                c = mma_bfloat16((a[2], zero, a[3], zero), (w[2], w[3]), c)
            cursor = feed(ring, cursor, start, stop, lane, blocks, weights, layer)
            step += int32(1)
        at = buffer * int32(PARTIALS_SIZE) + thread // int32(WARP) * int32(TILE_SIZE) + g * int32(PANEL) + q * int32(2)
        sums[at], sums[at + 1] = c[0], c[1]
        return cursor

    @device_function
    def panels_ahead(weights):
        return max(int32(PREFETCHED_BYTES // (STEP_SIZE * item_bytes)) // weights.num_steps, int32(1))

    @device_function
    def prefetch_panel(weights, layer, panel):
        size = int32(weights.num_steps * int32(STEP_SIZE * item_bytes))
        prefetch_run(weights.panels, first_weight(weights, layer, panel), size)

    @device_function
    def prefetch_panels(weights, layer, has_bias):
        thread, block, blocks = thread_and_block()
        panel = block + thread * blocks
        if thread < panels_ahead(weights) and panel < weights.num_panels:
            prefetch_panel(weights, layer, panel)
            prefetch(weights.scales, (layer * weights.num_panels + panel) * int32(PANEL))
            if has_bias:
                prefetch(weights.bias, layer * weights.features + panel * int32(PANEL))

    @device_function
    def prefetch_next(weights, layer, panel):
        thread, _, blocks = thread_and_block()
        following = int32(panel + panels_ahead(weights) * blocks)
        if thread == 0 and following < weights.num_panels:
            prefetch_panel(weights, layer, following)

    return Ring(address, fill, multiply, prefetch_panels, prefetch_next)


@device_function
def load_endings(endings, weights, layer, has_bias):
    """Ask for the scales and biases of the block's panels, ENDING numbers for each, into the shared array `endings`."""
    thread, block, blocks = thread_and_block()
    panels = (weights.num_panels - block + blocks - int32(1)) // blocks
    for i in range(thread, panels * int32(ENDING // 4), int32(LINEAR_THREADS)):
        number, part = int32(i) // int32(ENDING // 4), int32(i) % int32(ENDING // 4) * int32(4)
        to, panel = uint32(endings + uint32(int32(i) * int32(16))), block + number * blocks
        if part < PANEL:
            copy_async(to, weights.scales, (layer * weights.num_panels + panel) * int32(PANEL) + part)
        elif has_bias:
            copy_async(to, weights.bias, layer * weights.features + (panel - int32(1)) * int32(PANEL) + part)
    commit_copies()


@functools.cache
def linear_functions(dtype: str, purpose: str):
    """(read_first, linear): the block's share of a linear layer, as linear_kernel says.

    linear(target, width, before, rows, count, ring, cursor, sums, endings, first, weights, layer): of rows as
        Ring.multiply has them. The ring has been filled, and endings[first:] is what load_endings has brought.
    read_first(target, width, count, weights, layer): `before`, the thread's number of the first panel that is added to.
        What a thread adds to is written by nobody else in the phase before.
    """
    ring_, ending = ring_of(dtype), ending_of(dtype, purpose)
    multiply, prefetch_next = ring_.multiply, ring_.prefetch_next
    locate, find, finish, read, put = ending.locate, ending.find, ending.finish, ending.read, ending.put

    @device_function
    def is_result(thread, panel, count, weights):
        feature = panel * int32(PANEL) + thread % int32(PANEL)
        return thread < RESULTS and thread // int32(PANEL) < count and feature < weights.features

    @device_function
    def read_from(target, width, count, weights, layer, thread, panel):
        if not is_result(thread, panel, count, weights):
            return float32(0)
        place = locate(target, weights, layer, panel * int32(PANEL) + thread % int32(PANEL))
        return read(target, find(target, layer, width, thread // int32(PANEL), place))

    @device_function
    def read_first(target, width, count, weights, layer):
        thread, block, _ = thread_and_block()
        return read_from(target, width, count, weights, layer, thread, block)

    @device_function
    def linear(target, width, before, rows, count, ring, cursor, sums, endings, first, weights, layer):
        thread, block, blocks = thread_and_block()
        token, at, buffer = thread // int32(PANEL), first + thread % int32(PANEL), int32(0)
        for panel_ in range(block, weights.num_panels, blocks):
            panel = int32(panel_)
            prefetch_next(weights, layer, panel)
            cursor = multiply(sums, buffer, ring, cursor, rows, count, weights, layer)
            cuda.syncthreads()
            if is_result(thread, panel, count, weights):
                place = locate(target, weights, layer, panel * int32(PANEL) + thread % int32(PANEL))
                value = finish(total(sums, buffer, thread), (endings[at], endings[at + PANEL]))
                put(target, find(target, layer, width, token, place), before + value, place)
            before = read_from(target, width, count, weights, layer, thread, panel + blocks)
            buffer, at = int32(1) - buffer, at + int32(ENDING)  # so one barrier a panel is enough

    return read_first, linear


@functools.cache
def greatest_function(dtype: str):
    """greatest(rows, count, ring, cursor, sums, endings, first, weights): the greatest_key of the block's logits.

    Thread PANEL * token returns that of a token, -1 without a logit. The arguments are those of `linear`.
    """
    ring_, finish = ring_of(dtype), ending_of(dtype, LOGITS).finish
    multiply, prefetch_next = ring_.multiply, ring_.prefetch_next

    def greatest(rows, count, ring, cursor, sums, endings, first, weights):
        thread, block, blocks = thread_and_block()
        at, buffer, key = first + thread % int32(PANEL), int32(0), int64(-1)
        for panel in range(block, weights.num_panels, blocks):
            prefetch_next(weights, int32(0), int32(panel))
            cursor = multiply(sums, buffer, ring, cursor, rows, count, weights, int32(0))
            cuda.syncthreads()
            feature = int32(panel) * int32(PANEL) + thread % int32(PANEL)
            if thread < RESULTS and feature < weights.features:
                value = finish(total(sums, buffer, thread), (endings[at], float32(0)))
                key = max(key, greatest_key(value, feature))
            buffer, at = int32(1) - buffer, at + int32(ENDING)
        for distance in (4, 2, 1):
            key = max(key, cuda.shfl_xor_sync(uint32(ALL_LANES), key, distance))
        return key

    return device_function(greatest)


@device_function
def copy_rows(rows, source, count, num_steps):
    """Bring rows of inputs (count, num_steps * STEP) bfloat16 to a shared address, SHARED_PAD numbers after each."""
    thread, _, _ = thread_and_block()
    size = num_steps * int32(STEP)
    pieces = size // int32(8)
    for i in range(thread, count * pieces, int32(LINEAR_THREADS)):
        row = int32(i) // pieces
        at = (int32(i) - row * pieces) * int32(8)
        copy_async(uint32(rows + uint32((row * (size + int32(SHARED_PAD)) + at) * 2)), source, row * size + at)
    commit_copies()
    wait_for_copies(0)
    cuda.syncthreads()
