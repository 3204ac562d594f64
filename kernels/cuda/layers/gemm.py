"""inputs @ weights.T + bias for many tokens: a block for each tile of tokens and features.

16 bits and int8 run on the tensor cores, float32 on the ordinary units.

Inputs and weights pass through shared memory, some steps of K ahead. A token has the same bits as from linear.py: a
chain of products for each segment of K, and the segments' sums in order. On an H200, prompts of 124M reach a fifth of
mma.sync's rate: latency of first loads and last stores limits them.

If K is long and blocks are few, several share a tile's segments: the last of them adds all sums, in the same order.
"""

import functools
import math

from numba import cuda, float32, int32, int64, uint32

from ..jit import (
    WARP,
    commit_copies,
    copy_async,
    device_function,
    is_last_block,
    kernel,
    lane_and_warp,
    let_next_kernel_begin,
    load_fresh,
    shared_address,
    wait_for_copies,
    wait_for_kernel_before,
)
from ..params import DTYPES, LOAD_BYTES, OUT_TILE, SEGMENTS, STEP, STEP_SIZE
from .epilogue import epilogue_of
from .linear import first_weight, segment_start
from .tile_products import product_functions
from .tiles import EXCHANGE, ROWS_AT_ONCE, Tile, slots_of


@functools.cache
def gemm_kernel(dtype: str, tile: Tile, epilogue: str, parts: int = 1):
    """Return a kernel with the bits of linear_kernel's. Grid (*tile.grid(n, features), parts).

    run_sums: run_sums_size(...) float32. arrivals: a uint32 for each tile, 0 between kernels.
    """
    row = DTYPES[dtype]
    tile_panels = tile.features // OUT_TILE
    copy_inputs = _copy_function(tile.tokens, STEP, row.numbers.item_bytes, tile.threads, EXCHANGE)
    copy_weights = _copy_function(tile_panels, STEP_SIZE, row.item_bytes, tile.threads, 0)
    input_bytes = tile.input_bytes(dtype)
    sums_size, multiply, add_segment, write_sums = product_functions(dtype, tile)
    clear, keep, add_kept = _totals_functions(tile, parts)
    locate_own, read_own, store = _store_functions(dtype, tile, epilogue)
    totals_size = tile.lane_sums
    tile_tokens = tile.tokens
    tile_features = tile.features
    stage_bytes = tile.stage_bytes(dtype)
    num_stages = tile.stages
    ahead_steps = num_stages - 1
    pending = num_stages - 2  # groups of copies under way when a step is multiplied
    IS_ONE = tile.is_one_round
    IS_SHARED = parts > 1
    part_segments = SEGMENTS // parts

    @device_function
    def stage_of(stages, step):
        return uint32(stages + uint32(step) % num_stages * stage_bytes)

    def gemm(target, inputs, weights, layer, width, sizes, row_kind, run_sums, arrivals):
        let_next_kernel_begin()
        shared = cuda.shared.array(0, float32, alignment=16)
        sums = cuda.local.array(sums_size, float32)
        totals = cuda.local.array(totals_size, float32)
        before = cuda.local.array(ROWS_AT_ONCE, float32)
        first = cuda.blockIdx.y * tile_tokens
        count = sizes[row_kind]
        first_feature = cuda.blockIdx.x * tile_features
        if first >= count:
            return
        stages = shared_address(shared)
        num_steps = weights.num_steps
        first_panel = cuda.blockIdx.x * tile_panels
        panels = weights.panels, first_weight(weights, layer, first_panel), num_steps
        num_panels = min(int32(tile_panels), int32(weights.num_panels - first_panel))
        rows = inputs, int32(first * num_steps) * STEP, num_steps
        first_segment = cuda.blockIdx.z * part_segments
        step = segment_start(first_segment, num_steps)
        stop = segment_start(first_segment + part_segments, num_steps)
        for i in range(ahead_steps):
            ahead = int32(step + i)
            copy_weights(stage_of(stages, ahead) + input_bytes, *panels, num_panels, ahead, stop)
        lane = cuda.threadIdx.x % WARP
        if IS_ONE:
            place = locate_own(target, weights, layer, first_feature, lane)
        wait_for_kernel_before()
        for i in range(ahead_steps):
            ahead = int32(step + i)
            copy_inputs(stage_of(stages, ahead), *rows, int32(count - first), ahead, stop)
            commit_copies()
        if IS_ONE:
            read_own(before, target, layer, width, first, count, place)
        clear(totals)
        # Not 0 by what the compiler knows.
        zero = uint32(uint32(num_steps) >> uint32(31))
        for segment in range(first_segment, first_segment + part_segments):
            if IS_SHARED and first_segment > 0:
                clear(totals)
            for i in range(sums_size):
                sums[i] = float32(0)
            while step < segment_start(segment + 1, num_steps):
                wait_for_copies(pending)
                cuda.syncthreads()  # and no thread reads the step before
                ahead = int32(step + ahead_steps)
                copy_inputs(stage_of(stages, ahead), *rows, int32(count - first), ahead, stop)
                copy_weights(stage_of(stages, ahead) + input_bytes, *panels, num_panels, ahead, stop)
                commit_copies()
                multiply(sums, stage_of(stages, step), zero)
                step = int32(step + 1)
            add_segment(totals, sums)
            if IS_SHARED and first_segment > 0:
                keep(run_sums, int32(segment - (part_segments - 1)), totals)
        if IS_SHARED:
            if first_segment == 0:
                keep(run_sums, int32(0), totals)
            tile_index = int32(cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x)
            if not is_last_block(arrivals, tile_index, int32(parts), shared):
                return
            clear(totals)
            add_kept(totals, run_sums)
        if not IS_ONE:  # registers are for the sums until now
            place = locate_own(target, weights, layer, first_feature, lane)
        cuda.syncthreads()  # no thread reads the stages, which the sums overwrite
        write_sums(shared, totals)
        cuda.syncthreads()
        store(target, shared, place, before, weights, layer, width, first, count, first_feature)

    return kernel(gemm)


@functools.cache
def _totals_functions(tile: Tile, parts: int):
    """Return (clear, keep, add_kept): of a lane's totals, and of those that blocks which share a tile keep."""
    totals_size = tile.lane_sums
    threads = tile.threads
    slots = slots_of(parts)

    @device_function
    def clear(totals):
        for i in range(totals_size):
            totals[i] = float32(-0.0)  # -0 + x is x, also if x is -0

    @device_function
    def own_sums(slot):
        tile_index = cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x
        return uint32((tile_index * slots + slot) * (totals_size * threads) + cuda.threadIdx.x)

    @device_function
    def keep(run_sums, slot, totals):
        start = own_sums(slot)
        for i in range(totals_size):
            run_sums[uint32(start + i * threads)] = totals[i]

    @device_function
    def add_kept(totals, run_sums):
        for slot in range(slots):
            start = own_sums(slot)
            for i in range(totals_size):
                totals[i] += load_fresh(run_sums, uint32(start + i * threads))

    return clear, keep, add_kept


@functools.cache
def _copy_function(rows: int, row_size: int, item_bytes: int, threads: int, exchange: int):
    """Copy a step, row_size numbers, of up to `rows` rows; `first`: the first row's index in the source."""
    row_copies = row_size * item_bytes // LOAD_BYTES
    copy_size = LOAD_BYTES // item_bytes
    rows_at_once = threads // row_copies
    rounds = math.ceil(rows / rows_at_once)

    def copy(to, source, first, num_steps, count, step, stop):
        if step >= stop:
            return
        thread = cuda.threadIdx.x
        row = thread // row_copies
        chunk = thread % row_copies
        to += uint32((row * row_copies + (chunk ^ row % 2 * exchange)) * LOAD_BYTES)
        start = first + int32((row * num_steps + step) * row_size + chunk * copy_size)
        for i in range(rounds):
            if row + i * rows_at_once < count:
                further = int32(i * rows_at_once * row_size) * num_steps
                copy_async(to + i * (threads * LOAD_BYTES), source, start + further)

    return device_function(copy)


@functools.cache
def _store_functions(dtype: str, tile: Tile, epilogue: str):
    """Return (locate_own, read_own, store).

    locate_own: the place of one of a lane's columns
    read_own: the numbers before a lane's sums, if is_one_round
    """
    locate, find, finish, read, put = epilogue_of(dtype, epilogue)
    tile_tokens = tile.tokens
    tile_features = tile.features
    IS_ONE = tile.is_one_round
    warps = tile.warps
    row_size = tile.row_size

    @device_function
    def locate_own(target, weights, layer, first_feature, column):
        feature = min(int32(first_feature + column), int32(weights.features - 1))
        return locate(target, weights, layer, feature)

    @device_function
    def find_rows(places, target, layer, width, token, stop, place):
        for i in range(ROWS_AT_ONCE):  # past the last token, the last: no branch
            own = min(int32(token + i * warps), int32(stop - 1))
            places[i] = find(target, layer, width, own, place)

    @device_function
    def read_own(before, target, layer, width, first, count, place):
        (_, warp) = lane_and_warp()
        places = cuda.local.array(ROWS_AT_ONCE, int64)
        stop = min(int32(count), int32(first + tile_tokens))
        find_rows(places, target, layer, width, int32(first + warp), stop, place)
        for i in range(ROWS_AT_ONCE):
            before[i] = read(target, places[i])

    def store(target, sums, place, before, weights, layer, width, first, count, first_feature):
        (lane, warp) = lane_and_warp()
        values = cuda.local.array(ROWS_AT_ONCE, float32)
        places = cuda.local.array(ROWS_AT_ONCE, int64)
        stop = min(int32(count), int32(first + tile_tokens))
        for column in range(lane, int32(tile_features), int32(WARP)):
            following = place
            if not IS_ONE:
                following = locate_own(target, weights, layer, first_feature, int32(column + WARP))
            if first_feature + column < weights.features:
                token = int32(first + warp)
                at = uint32(warp * row_size + column)
                while token < stop:
                    find_rows(places, target, layer, width, token, stop, place)
                    for i in range(ROWS_AT_ONCE):
                        if not IS_ONE:
                            before[i] = read(target, places[i])
                    for i in range(ROWS_AT_ONCE):
                        values[i] = sums[uint32(at + i * warps * row_size)]
                    for i in range(ROWS_AT_ONCE):
                        values[i] = before[i] + finish(values[i], place)
                    for i in range(ROWS_AT_ONCE):
                        if int32(token + i * warps) < stop:
                            put(target, places[i], values[i], place)
                    token = int32(token + ROWS_AT_ONCE * warps)
                    at = uint32(at + ROWS_AT_ONCE * warps * row_size)
            place = following

    return locate_own, read_own, device_function(store)
