"""inputs @ weights.T + bias for many tokens: a block for each tile of tokens and features.

bfloat16 and int8 run on the tensor cores, float32 on the ordinary units, from compute capability 8.0 on.

Inputs and weights pass through shared memory, several steps of K ahead. A token has the same bits as from linear.py: a
chain of products for each segment of K, and the segments' sums in order. On an H200, prompts of 124M reach a fifth of
mma.sync's rate, and a quarter of float32's: latency of first loads and last stores limits them.

If K is long and blocks are few, several share a tile's segments: the last of them adds all sums, in the same order.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

from numba import cuda, float32, int32, int64, uint32

from ...backend import DeviceError
from ..jit import (
    ALL_LANES,
    WARP,
    bits_to_float32,
    commit_copies,
    copy_async,
    device_function,
    is_last_block,
    kernel,
    lane_and_warp,
    let_next_kernel_begin,
    load_fresh,
    load_shared,
    shared_address,
    unrolled,
    wait_for_copies,
    wait_for_kernel_before,
)
from ..params import DTYPES, OUT_TILE, SEGMENTS, STEP, STEP_SIZE, Dtype
from .epilogue import epilogue_of
from .linear import ROW_TILE, first_weight, segment_start

STAGES = 4  # steps of K in shared memory: three are on their way
SUM_PAD = 8  # float32 between two rows of sums, which spreads a warp's writes over the banks
COPY_BYTES = 16
ROW_BYTES = STEP * 2  # of a token's step in shared memory, in bfloat16
EXCHANGE = 4  # copies: in odd tokens, such parts of a row change places in twos, which lie in different banks
ROWS_AT_ONCE = 8  # tokens whose sums a lane finishes together
PENDING = STAGES - 2  # groups of copies under way when a step is multiplied
LONG = 40  # steps of K from which on blocks share a tile: their sums are at most some half of its loads
MAX_SHARED = 2  # blocks of a multiprocessor, up to which they do


@dataclass(frozen=True)
class Tile:
    """A block's warps, in all 2 n, in float32 4 n; each multiplies token_tiles * 16 tokens by `panels` panels."""

    token_warps: int
    feature_warps: int
    token_tiles: int
    panels: int

    @property
    def tokens(self) -> int:
        return self.token_warps * self.token_tiles * ROW_TILE

    @property
    def features(self) -> int:
        return self.feature_warps * self.panels * OUT_TILE

    @property
    def warps(self) -> int:
        return self.token_warps * self.feature_warps

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def is_one_round(self) -> bool:
        """Return whether a lane finishes ROWS_AT_ONCE sums of a feature, and no more."""
        return self.features <= WARP and self.tokens == ROWS_AT_ONCE * self.warps

    def grid(self, tokens: int, features: int) -> tuple[int, int]:
        return math.ceil(features / self.features), math.ceil(tokens / self.tokens)

    def input_bytes(self, dtype: str) -> int:
        return self.tokens * STEP * DTYPES[dtype].numbers.item_bytes

    def stage_bytes(self, dtype: str) -> int:
        return self.input_bytes(dtype) + self.features * STEP * DTYPES[dtype].item_bytes

    def shared_bytes(self, dtype: str) -> int:
        return max(STAGES * self.stage_bytes(dtype), self.tokens * (self.features + SUM_PAD) * 4)


# From how many blocks a multiprocessor on: small tiles hide latency, large tiles share loads. Of six in 24 shapes on an
# H200, the first two are the fastest.
TILES = {Tile(2, 2, 1, 2): 0, Tile(2, 4, 2, 3): 1, Tile(2, 4, 4, 4): 2}


def pick_tile(tokens: int, features: int, num_steps: int, dtype: str, device: Any) -> tuple[Tile, int]:
    """Return the largest tile that fits in the device's shared memory and has enough blocks, and how many share it."""
    for tile, least in reversed(TILES.items()):
        blocks = math.prod(tile.grid(tokens, features))
        wanted = least * device.multiprocessors
        parts = 1
        if num_steps >= LONG and least < MAX_SHARED and DTYPES[dtype].numbers.has_mma:
            while parts < SEGMENTS and 2 * parts * blocks <= MAX_SHARED * device.multiprocessors:
                parts *= 2
        if tile.shared_bytes(dtype) <= device.shared_bytes and parts * blocks >= wanted:
            return tile, parts
    raise DeviceError(f"no tile of {dtype} fits in this GPU's shared memory.")


def run_sums_size(device: Any) -> int:
    """Return how many numbers the sums of all shared tiles are: most if two blocks share each."""
    tiles = MAX_SHARED * device.multiprocessors // 2
    sizes = (tile.tokens * tile.features for tile, least in TILES.items() if least < MAX_SHARED)
    return tiles * slots_of(2) * max(sizes)


def slots_of(parts: int) -> int:
    """Return how many sums of a tile its blocks write: the first block one, the others one for each segment."""
    return 1 + SEGMENTS - SEGMENTS // parts


@functools.cache
def gemm_kernel(dtype: str, tile: Tile, epilogue: str, parts: int = 1):
    """Return a kernel with the bits of linear_kernel's. Grid (*tile.grid(n, features), parts).

    run_sums: run_sums_size(...) float32. arrivals: a uint32 for each tile, 0 between kernels.
    """
    copy_inputs = _copy_inputs_function(dtype, tile)
    copy_weights = _copy_weights_function(dtype, tile)
    functions = _mma_functions if DTYPES[dtype].numbers.has_mma else _fma_functions
    sums_size, multiply, add_segment, write_sums = functions(dtype, tile)
    locate_own, read_own, store = _store_functions(dtype, tile, epilogue)
    totals_size = tile.token_tiles * tile.panels * 4
    tile_tokens = tile.tokens
    tile_features = tile.features
    stage_bytes = tile.stage_bytes(dtype)
    IS_ONE = tile.is_one_round
    IS_SHARED = parts > 1
    part_segments = SEGMENTS // parts
    slots = slots_of(parts)
    threads = tile.threads

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
            run_sums[uint32(start + uint32(i * threads))] = totals[i]

    @device_function
    def add_kept(totals, run_sums):
        for slot in range(slots):
            start = own_sums(slot)
            for i in range(totals_size):
                totals[i] += load_fresh(run_sums, uint32(start + uint32(i * threads)))

    @device_function
    def stage_of(stages, step):
        return uint32(stages + uint32(uint32(step) % uint32(STAGES)) * uint32(stage_bytes))

    def gemm(target, inputs, weights, layer, width, sizes, row_kind, run_sums, arrivals):
        let_next_kernel_begin()
        shared = cuda.shared.array(0, float32, alignment=16)
        sums = cuda.local.array(sums_size, float32)
        totals = cuda.local.array(totals_size, float32)
        before = cuda.local.array(ROWS_AT_ONCE, float32)
        first = int32(cuda.blockIdx.y) * int32(tile_tokens)
        count = sizes[row_kind]
        first_feature = int32(cuda.blockIdx.x) * int32(tile_features)
        if first >= count:
            return
        stages = shared_address(shared)
        first_segment = int32(cuda.blockIdx.z) * int32(part_segments)
        step = segment_start(first_segment, weights.num_steps)
        stop = segment_start(first_segment + int32(part_segments), weights.num_steps)
        for i in range(int32(0), int32(STAGES - 1)):
            ahead = int32(step + i)
            copy_weights(stage_of(stages, ahead), weights, layer, first_feature, ahead, stop)
        lane = int32(cuda.threadIdx.x) % int32(WARP)
        if IS_ONE:
            place = locate_own(target, weights, layer, first_feature, lane)
        wait_for_kernel_before()
        for i in range(int32(0), int32(STAGES - 1)):
            ahead = int32(step + i)
            copy_inputs(stage_of(stages, ahead), inputs, weights.num_steps, first, count, ahead, stop)
            commit_copies()
        if IS_ONE:
            read_own(before, target, layer, width, first, count, place)
        clear(totals)
        # Not 0 by what the compiler knows.
        zero = uint32(uint32(weights.num_steps) >> uint32(31))
        for segment in range(first_segment, first_segment + int32(part_segments)):
            if IS_SHARED and first_segment > 0:
                clear(totals)
            for i in range(sums_size):
                sums[i] = float32(0)
            while step < segment_start(segment + int32(1), weights.num_steps):
                wait_for_copies(PENDING)
                cuda.syncthreads()  # and no thread reads the step before
                ahead = int32(step + int32(STAGES - 1))
                copy_inputs(stage_of(stages, ahead), inputs, weights.num_steps, first, count, ahead, stop)
                copy_weights(stage_of(stages, ahead), weights, layer, first_feature, ahead, stop)
                commit_copies()
                multiply(sums, stage_of(stages, step), zero)
                step = int32(step + int32(1))
            add_segment(totals, sums)
            if IS_SHARED and first_segment > 0:
                keep(run_sums, int32(segment - int32(part_segments - 1)), totals)
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
def _copy_inputs_function(dtype: str, tile: Tile):
    row_bytes = STEP * DTYPES[dtype].numbers.item_bytes
    row_copies = row_bytes // COPY_BYTES
    copy_size = STEP * COPY_BYTES // row_bytes
    tokens_at_once = tile.threads // row_copies
    rounds = tile.tokens // tokens_at_once

    def copy_inputs(stage, inputs, num_steps, first, count, step, stop):
        thread = int32(cuda.threadIdx.x)
        if step >= stop:
            return
        token = thread // int32(row_copies)
        chunk = thread % int32(row_copies)
        to = stage + uint32(
            (token * int32(row_copies) + (chunk ^ token % 2 * int32(EXCHANGE))) * int32(COPY_BYTES)
        )
        start = int32(((first + token) * num_steps + step) * int32(STEP) + chunk * int32(copy_size))
        for i in range(rounds):
            if first + token + int32(i * tokens_at_once) < count:
                further = int32(i * tokens_at_once * STEP) * num_steps
                copy_async(to + uint32(i * (tokens_at_once * row_bytes)), inputs, int32(start + further))

    return device_function(copy_inputs)


@functools.cache
def _copy_weights_function(dtype: str, tile: Tile):
    input_bytes = tile.input_bytes(dtype)
    threads = tile.threads
    tile_panels = tile.features // OUT_TILE
    panel_copies = STEP_SIZE * DTYPES[dtype].item_bytes // COPY_BYTES
    copy_size = DTYPES[dtype].lane_size
    panels_at_once = threads // panel_copies
    rounds = math.ceil(tile_panels / panels_at_once)

    def copy_weights(stage, weights, layer, first_feature, step, stop):
        thread = int32(cuda.threadIdx.x)
        num_steps = weights.num_steps
        if step >= stop:
            return
        panel = thread // int32(panel_copies)
        part = thread % int32(panel_copies)
        to = stage + uint32(input_bytes + thread * int32(COPY_BYTES))
        first_panel = first_feature // int32(OUT_TILE)
        start = (
            first_weight(weights, layer, first_panel + panel)
            + step * int32(STEP_SIZE)
            + part * int32(copy_size)
        )
        for i in range(rounds):
            further = int32(i * panels_at_once)
            if panel + further < tile_panels and first_panel + panel + further < weights.num_panels:
                further *= num_steps * int32(STEP_SIZE)
                copy_async(to + uint32(i * (threads * COPY_BYTES)), weights.panels, start + further)

    return device_function(copy_weights)


@functools.cache
def _mma_functions(dtype: str, tile: Tile):
    """Return the sums of a lane, (sums, stage, zero), (totals, sums), (shared, totals), in mma's layout."""
    # Eight lanes read 64 bytes of two tokens each, which without the exchange would share banks.
    load_panels = _load_panels_function(DTYPES[dtype], tile.panels)
    mma = DTYPES[dtype].numbers.mma
    token_tiles = tile.token_tiles
    panels = tile.panels
    feature_warps = tile.feature_warps
    input_bytes = tile.input_bytes(dtype)
    panel_bytes = STEP_SIZE * DTYPES[dtype].item_bytes
    words_size = tile.panels * 4
    sums_size = token_tiles * panels * 4
    row_size = tile.features + SUM_PAD

    @device_function
    def multiply_panels(sums, t, operand, words, first):
        for p in range(panels):
            i = (t * panels + p) * 4
            w = p * 4 + first
            c = (sums[i], sums[i + 1], sums[i + 2], sums[i + 3])
            c = mma(operand, (words[w], words[w + 1]), c)
            sums[i], sums[i + 1], sums[i + 2], sums[i + 3] = c

    @device_function
    def multiply_half(sums, words, inputs_at, zero):
        # A zero that ptxas does not know keeps words in place: else it copies them three times for every mma.
        for t in range(token_tiles):
            a = load_shared(inputs_at + uint32(t * (ROW_TILE * ROW_BYTES)))
            b = load_shared(inputs_at + uint32(t * (ROW_TILE * ROW_BYTES) + 8 * ROW_BYTES))
            low = uint32(a[0] | zero), uint32(b[0] | zero), uint32(a[1] | zero), uint32(b[1] | zero)
            high = uint32(a[2] | zero), uint32(b[2] | zero), uint32(a[3] | zero), uint32(b[3] | zero)
            multiply_panels(sums, t, low, words, 0)
            multiply_panels(sums, t, high, words, 2)

    def multiply(sums, stage, zero):
        (lane, warp) = lane_and_warp()
        g, q = lane // int32(4), lane % int32(4)
        token = warp // int32(feature_warps) * int32(token_tiles * ROW_TILE) + g
        panel = warp % int32(feature_warps) * int32(panels)
        chunk = q ^ (g % int32(2) * int32(4))
        row = stage + uint32(token * int32(ROW_BYTES))
        weights_at = stage + uint32(input_bytes + panel * panel_bytes)
        packed = cuda.local.array(words_size, uint32)
        words = cuda.local.array(words_size, uint32)
        load_panels(words, packed, weights_at, lane, 0)
        multiply_half(sums, words, row + uint32(chunk * int32(COPY_BYTES)), zero)
        load_panels(words, packed, weights_at, lane, 1)
        multiply_half(sums, words, row + uint32((chunk ^ int32(4)) * int32(COPY_BYTES)), zero)

    def add_segment(totals, sums):
        for i in range(sums_size):
            totals[i] += sums[i]

    def write_sums(shared, totals):
        (lane, warp) = lane_and_warp()
        g, q = lane // int32(4), lane % int32(4)
        token = warp // int32(feature_warps) * int32(token_tiles * ROW_TILE) + g
        start = (
            token * int32(row_size) + warp % int32(feature_warps) * int32(panels * OUT_TILE) + q * int32(2)
        )
        for t in range(token_tiles):
            for p in range(panels):
                i = (t * panels + p) * 4
                at = start + int32(t * (ROW_TILE * row_size) + p * OUT_TILE)
                shared[at] = totals[i]
                shared[at + 1] = totals[i + 1]
                at += int32(8 * row_size)
                shared[at] = totals[i + 2]
                shared[at + 1] = totals[i + 3]

    return sums_size, *map(device_function, (multiply, add_segment, write_sums))


@functools.cache
def _load_panels_function(dtype: Dtype, panels: int):
    """Load half a step's weights as operands of mma; packed: a step's, which `expand` takes."""
    half_bytes = STEP_SIZE
    expand = dtype.expand

    def load_operands(words, packed, address, lane, half):
        for p in range(panels):
            loaded = load_shared(address + uint32((p * 2 + half) * half_bytes + lane * int32(COPY_BYTES)))
            for i in range(4):
                words[p * 4 + i] = loaded[i]

    def load_packed(words, packed, address, lane, half):
        for p in range(panels):
            if half == 0:
                loaded = load_shared(address + uint32(p * half_bytes + lane * int32(COPY_BYTES)))
                for i in range(4):
                    packed[p * 4 + i] = loaded[i]
            first = expand(packed[p * 4 + half * 2])
            second = expand(packed[p * 4 + half * 2 + 1])
            words[p * 4], words[p * 4 + 1] = first
            words[p * 4 + 2], words[p * 4 + 3] = second

    return device_function(load_packed if expand else load_operands)


@functools.cache
def _fma_functions(dtype: str, tile: Tile):
    """Return the same. A lane has each second token, each fourth feature, and each fourth four of K, from its own on.

    Of four tokens, lane q holds those of q, q ^ 1, q ^ 2 and q ^ 3 in this order, and keeps the first. In each half of
    a warp, two lanes of each load have one address: it takes two turns of shared memory rather than four.
    """
    rows = tile.token_tiles * ROW_TILE // 2
    columns = 2 * tile.panels
    feature_warps = tile.feature_warps
    row_bytes = STEP * 4
    panel_bytes = STEP_SIZE * 4
    part_bytes = WARP * COPY_BYTES
    input_bytes = tile.input_bytes(dtype)
    row_size = tile.features + SUM_PAD
    words_size = 4 * columns

    @device_function
    def multiply_four(i, sums, words, first):
        q = int32(cuda.threadIdx.x) // int32(4) % int32(4)
        for j in range(4):
            row = first + uint32((q ^ int32(j)) * int32(2 * row_bytes))
            x = load_shared(row + uint32(4 * i * (2 * row_bytes)))
            for c in range(columns):
                at = (4 * i + j) * columns + c
                for k in range(4):
                    sums[at] = cuda.fma(words[c * 4 + k], bits_to_float32(x[k]), sums[at])

    @device_function
    def add_four(i, totals, sums):
        for c in range(columns):
            at = 4 * i * columns + c
            near = sums[at] + from_lane(sums[at + columns], 4)
            far = sums[at + 2 * columns] + from_lane(sums[at + 3 * columns], 4)
            totals[i * columns + c] += near + from_lane(far, 8)

    multiply_rows = unrolled(multiply_four, rows // 4)
    add_segment = unrolled(add_four, rows // 4)

    @device_function
    def place():
        """Return the first token and the first feature of a lane, and q."""
        (lane, warp) = lane_and_warp()
        token = warp // int32(feature_warps) * int32(2 * rows) + lane // int32(2) % int32(2)
        feature = lane // int32(16) * int32(2) + lane % int32(2)
        return token, warp % int32(feature_warps) * int32(4 * columns) + feature, lane // int32(4) % int32(4)

    def multiply(sums, stage, zero):
        words = cuda.local.array(words_size, float32)
        (token, feature, q) = place()
        row = stage + uint32(token * int32(row_bytes) + q * int32(COPY_BYTES))
        panel = feature // int32(OUT_TILE)
        column = feature % int32(OUT_TILE)
        weights_at = stage + uint32(
            input_bytes + panel * int32(panel_bytes) + (4 * column + q) * int32(COPY_BYTES)
        )
        for part in range(int32(0), int32(4)):
            for c in range(columns):
                at = part * int32(part_bytes) + int32(c // 2 * panel_bytes + c % 2 * (part_bytes // 2))
                loaded = load_shared(weights_at + uint32(at))
                for k in range(4):
                    words[c * 4 + k] = bits_to_float32(loaded[k])
            chunk = (part ^ token % int32(2)) * int32(4 * COPY_BYTES)
            multiply_rows(sums, words, row + uint32(chunk))

    def write_sums(shared, totals):
        token, feature, q = place()
        for i in range(rows // 4):
            for c in range(columns):
                shared[(token + 2 * (4 * i + q)) * row_size + feature + 4 * c] = totals[i * columns + c]

    return rows * columns, device_function(multiply), add_segment, device_function(write_sums)


@device_function
def from_lane(value, distance):
    return cuda.shfl_xor_sync(uint32(ALL_LANES), value, distance)


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
    row_size = tile.features + SUM_PAD

    @device_function
    def locate_own(target, weights, layer, first_feature, column):
        feature = min(int32(first_feature + column), int32(weights.features - int32(1)))
        return locate(target, weights, layer, feature)

    @device_function
    def find_rows(places, target, layer, width, token, stop, place):
        for i in range(ROWS_AT_ONCE):  # past the last token, the last: no branch
            own = min(int32(token + int32(i * warps)), int32(stop - 1))
            places[i] = find(target, layer, width, own, place)

    @device_function
    def read_own(before, target, layer, width, first, count, place):
        (_, warp) = lane_and_warp()
        places = cuda.local.array(ROWS_AT_ONCE, int64)
        stop = min(int32(count), int32(first + int32(tile_tokens)))
        find_rows(places, target, layer, width, int32(first + warp), stop, place)
        for i in range(ROWS_AT_ONCE):
            before[i] = read(target, places[i])

    def store(target, sums, place, before, weights, layer, width, first, count, first_feature):
        (lane, warp) = lane_and_warp()
        values = cuda.local.array(ROWS_AT_ONCE, float32)
        places = cuda.local.array(ROWS_AT_ONCE, int64)
        stop = min(int32(count), int32(first + int32(tile_tokens)))
        for column in range(lane, int32(tile_features), int32(WARP)):
            following = place
            if not IS_ONE:
                following = locate_own(target, weights, layer, first_feature, int32(column + int32(WARP)))
            if first_feature + column < weights.features:
                token = int32(first + warp)
                at = uint32(warp * int32(row_size) + column)
                while token < stop:
                    find_rows(places, target, layer, width, token, stop, place)
                    for i in range(ROWS_AT_ONCE):
                        if not IS_ONE:
                            before[i] = read(target, places[i])
                    for i in range(ROWS_AT_ONCE):
                        values[i] = sums[uint32(at + uint32(i * warps * row_size))]
                    for i in range(ROWS_AT_ONCE):
                        values[i] = before[i] + finish(values[i], place)
                    for i in range(ROWS_AT_ONCE):
                        if int32(token + int32(i * warps)) < stop:
                            put(target, places[i], values[i], place)
                    token = int32(token + int32(ROWS_AT_ONCE * warps))
                    at = uint32(at + uint32(ROWS_AT_ONCE * warps * row_size))
            place = following

    return locate_own, read_own, device_function(store)
