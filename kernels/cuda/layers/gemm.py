"""inputs @ weights.T + bias for many tokens: a block for each tile of tokens and features, on the tensor cores.

Inputs and weights pass through shared memory, several steps of K ahead. A token has the same bits as from linear.py: a
chain of products for each segment of K, and the segments' sums in order. On an H200, prompts of 124M reach a fifth of
the rate of mma.sync: what limits is the latency of a block's first loads and of its last stores.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

from numba import cuda, float32, int32, int64, uint32

from tinygpt.kernels.cuda.layers.epilogue import epilogue_of
from tinygpt.kernels.cuda.layers.linear import ROW_TILE, first_weight, segment_start
from tinygpt.kernels.cuda.params import OUT_TILE, SEGMENTS, STEP, STEP_SIZE
from tinygpt.kernels.cuda.runtime.jit import device_function, kernel
from tinygpt.kernels.cuda.runtime.ptx import (
    WARP,
    commit_copies,
    copy_async,
    int8_to_bfloat16,
    let_next_kernel_begin,
    load_shared,
    mma_bfloat16,
    shared_address,
    wait_for_copies,
    wait_for_kernel_before,
)

STAGES = 4  # steps of K in shared memory: three are on their way
SUM_PAD = 8  # float32 between two rows of sums, which spreads a warp's writes over the banks
WEIGHT_BYTES = {"bfloat16": 2, "int8": 1}

COPY_BYTES = 16
ROW_BYTES = STEP * 2  # of a token's step in shared memory
ROW_COPIES = ROW_BYTES // COPY_BYTES
ROWS_AT_ONCE = 8  # tokens whose sums a lane finishes together
PENDING = STAGES - 2  # groups of copies under way when a step is multiplied


@dataclass(frozen=True)
class Tile:
    """A block's warps, in all an even number; each multiplies token_tiles * 16 tokens by `panels` panels."""

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

    def grid(self, tokens: int, features: int) -> tuple[int, int]:
        return math.ceil(features / self.features), math.ceil(tokens / self.tokens)

    def input_bytes(self) -> int:
        return self.tokens * STEP * 2

    def stage_bytes(self, dtype: str) -> int:
        return self.input_bytes() + self.features // OUT_TILE * STEP_SIZE * WEIGHT_BYTES[dtype]

    def shared_bytes(self, dtype: str) -> int:
        return max(STAGES * self.stage_bytes(dtype), self.tokens * (self.features + SUM_PAD) * 4)


# 32, 64 and 128 tokens by 32, 96 and 128 features, and from how many blocks a multiprocessor on. Smaller tiles hide
# latency better, larger tiles share more loads: of six tiles in 24 shapes on an H200, the first two are the fastest.
TILES = {Tile(2, 2, 1, 2): 0, Tile(2, 4, 2, 3): 1, Tile(2, 4, 4, 4): 2}


def pick_tile(tokens: int, features: int, device: Any) -> Tile:
    """Return the largest tile that fits in the device's shared memory and has enough blocks."""
    return next(
        tile
        for tile, least in reversed(TILES.items())
        if tile.shared_bytes("bfloat16") <= device.shared_bytes
        and math.prod(tile.grid(tokens, features)) >= least * device.multiprocessors
    )


@functools.cache
def gemm_kernel(dtype: str, tile: Tile, epilogue: str):
    """Return a kernel with the bits and arguments of linear_kernel's, not for float32. Grid tile.grid(n, features)."""
    copy_inputs, copy_weights = _copy_inputs_function(tile), _copy_weights_function(dtype, tile)
    multiply = _multiply_function(dtype, tile)
    write_sums, store = _write_sums_function(tile), _store_function(dtype, tile, epilogue)
    tile_tokens, tile_features, stage_bytes = tile.tokens, tile.features, tile.stage_bytes(dtype)
    sums_size = tile.token_tiles * tile.panels * 4

    @device_function
    def stage_of(stages, step):
        return uint32(stages + uint32(uint32(step) % uint32(STAGES)) * uint32(stage_bytes))

    def gemm(target, inputs, weights, layer, width, sizes, row_kind):
        let_next_kernel_begin()
        shared = cuda.shared.array(0, float32, alignment=16)
        sums, totals = cuda.local.array(sums_size, float32), cuda.local.array(sums_size, float32)
        first, count = int32(cuda.blockIdx.y) * int32(tile_tokens), sizes[row_kind]
        first_feature = int32(cuda.blockIdx.x) * int32(tile_features)
        if first >= count:
            return
        stages = shared_address(shared)
        for ahead in range(int32(0), int32(STAGES - 1)):
            copy_weights(stage_of(stages, ahead), weights, layer, first_feature, ahead)
        wait_for_kernel_before()
        for ahead in range(int32(0), int32(STAGES - 1)):
            copy_inputs(stage_of(stages, ahead), inputs, weights.num_steps, first, count, ahead)
            commit_copies()
        for i in range(sums_size):
            totals[i] = float32(-0.0)  # -0 + x is x, also if x is -0
        step = int32(0)
        for segment in range(int32(0), int32(SEGMENTS)):
            for i in range(sums_size):
                sums[i] = float32(0)
            while step < segment_start(segment + int32(1), weights.num_steps):
                wait_for_copies(PENDING)
                cuda.syncthreads()  # and no thread reads the step before
                ahead = int32(step + int32(STAGES - 1))
                copy_inputs(stage_of(stages, ahead), inputs, weights.num_steps, first, count, ahead)
                copy_weights(stage_of(stages, ahead), weights, layer, first_feature, ahead)
                commit_copies()
                multiply(sums, stage_of(stages, step))
                step = int32(step + int32(1))
            for i in range(sums_size):
                totals[i] += sums[i]
        cuda.syncthreads()  # no thread reads the stages, which the sums overwrite
        write_sums(shared, totals)
        cuda.syncthreads()
        store(target, shared, weights, layer, width, first, count, first_feature)

    return kernel(gemm)


@functools.cache
def _copy_inputs_function(tile: Tile):
    # In odd tokens the halves of a row are exchanged: see _multiply_function.
    tokens_at_once = tile.threads // ROW_COPIES
    rounds = tile.tokens // tokens_at_once

    def copy_inputs(stage, inputs, num_steps, first, count, step):
        thread = int32(cuda.threadIdx.x)
        if step >= num_steps:
            return
        token, chunk = thread // int32(ROW_COPIES), thread % int32(ROW_COPIES)
        to = stage + uint32(token * int32(ROW_BYTES) + (chunk ^ (token % int32(2) * int32(4))) * int32(COPY_BYTES))
        start = int32(((first + token) * num_steps + step) * int32(STEP) + chunk * int32(8))
        for i in range(rounds):
            if first + token + int32(i * tokens_at_once) < count:
                further = int32(i * tokens_at_once * STEP) * num_steps
                copy_async(to + uint32(i * (tokens_at_once * ROW_BYTES)), inputs, int32(start + further))

    return device_function(copy_inputs)


@functools.cache
def _copy_weights_function(dtype: str, tile: Tile):
    input_bytes, threads, tile_panels = tile.input_bytes(), tile.threads, tile.features // OUT_TILE
    panel_copies, copy_size = STEP_SIZE * WEIGHT_BYTES[dtype] // COPY_BYTES, COPY_BYTES // WEIGHT_BYTES[dtype]
    panels_at_once = threads // panel_copies
    rounds = math.ceil(tile_panels / panels_at_once)

    def copy_weights(stage, weights, layer, first_feature, step):
        thread, num_steps = int32(cuda.threadIdx.x), weights.num_steps
        if step >= num_steps:
            return
        panel, part = thread // int32(panel_copies), thread % int32(panel_copies)
        to = stage + uint32(input_bytes + thread * int32(COPY_BYTES))
        first_panel = first_feature // int32(OUT_TILE)
        start = first_weight(weights, layer, first_panel + panel) + step * int32(STEP_SIZE) + part * int32(copy_size)
        for i in range(rounds):
            further = int32(i * panels_at_once)
            if panel + further < tile_panels and first_panel + panel + further < weights.num_panels:
                further *= num_steps * int32(STEP_SIZE)
                copy_async(to + uint32(i * (threads * COPY_BYTES)), weights.panels, start + further)

    return device_function(copy_weights)


@functools.cache
def _multiply_function(dtype: str, tile: Tile):
    # Eight lanes read 64 bytes of two tokens each, which without the exchange would share banks.
    load_panels = _load_panels_function(dtype, tile.panels)
    token_tiles, panels, feature_warps = tile.token_tiles, tile.panels, tile.feature_warps
    input_bytes, panel_bytes, words_size = tile.input_bytes(), STEP_SIZE * WEIGHT_BYTES[dtype], tile.panels * 4

    @device_function
    def multiply_half(sums, words, inputs_at):
        # With a zero that ptxas does not know, each word is computed into its place; otherwise ptxas copies words
        # three times for every mma.
        zero = uint32(cuda.blockIdx.z)
        for t in range(token_tiles):
            a = load_shared(inputs_at + uint32(t * (ROW_TILE * ROW_BYTES)))
            b = load_shared(inputs_at + uint32(t * (ROW_TILE * ROW_BYTES) + 8 * ROW_BYTES))
            low = uint32(a[0] | zero), uint32(b[0] | zero), uint32(a[1] | zero), uint32(b[1] | zero)
            high = uint32(a[2] | zero), uint32(b[2] | zero), uint32(a[3] | zero), uint32(b[3] | zero)
            for p in range(panels):
                i = (t * panels + p) * 4
                c = (sums[i], sums[i + 1], sums[i + 2], sums[i + 3])
                c = mma_bfloat16(low, (words[p * 4], words[p * 4 + 1]), c)
                sums[i], sums[i + 1], sums[i + 2], sums[i + 3] = c
            for p in range(panels):
                i = (t * panels + p) * 4
                c = (sums[i], sums[i + 1], sums[i + 2], sums[i + 3])
                c = mma_bfloat16(high, (words[p * 4 + 2], words[p * 4 + 3]), c)
                sums[i], sums[i + 1], sums[i + 2], sums[i + 3] = c

    def multiply(sums, stage):
        lane, warp = int32(cuda.threadIdx.x) % int32(WARP), int32(cuda.threadIdx.x) // int32(WARP)
        g, q = lane // int32(4), lane % int32(4)
        token = warp // int32(feature_warps) * int32(token_tiles * ROW_TILE) + g
        panel = warp % int32(feature_warps) * int32(panels)
        chunk = q ^ (g % int32(2) * int32(4))
        row, weights_at = stage + uint32(token * int32(ROW_BYTES)), stage + uint32(input_bytes + panel * panel_bytes)
        packed, words = cuda.local.array(words_size, uint32), cuda.local.array(words_size, uint32)
        load_panels(words, packed, weights_at, lane, 0)
        multiply_half(sums, words, row + uint32(chunk * int32(COPY_BYTES)))
        load_panels(words, packed, weights_at, lane, 1)
        multiply_half(sums, words, row + uint32((chunk ^ int32(4)) * int32(COPY_BYTES)))

    return device_function(multiply)


@functools.cache
def _load_panels_function(dtype: str, panels: int):
    """Load half a step's weights as bfloat16; packed: a step's int8."""
    half_bytes = STEP_SIZE

    def load_bfloat16(words, packed, address, lane, half):
        for p in range(panels):
            loaded = load_shared(address + uint32((p * 2 + half) * half_bytes + lane * int32(COPY_BYTES)))
            for i in range(4):
                words[p * 4 + i] = loaded[i]

    def load_int8(words, packed, address, lane, half):
        for p in range(panels):
            if half == 0:
                loaded = load_shared(address + uint32(p * half_bytes + lane * int32(COPY_BYTES)))
                for i in range(4):
                    packed[p * 4 + i] = loaded[i]
            first = int8_to_bfloat16(packed[p * 4 + half * 2])
            second = int8_to_bfloat16(packed[p * 4 + half * 2 + 1])
            words[p * 4], words[p * 4 + 1] = first
            words[p * 4 + 2], words[p * 4 + 3] = second

    return device_function(load_int8 if dtype == "int8" else load_bfloat16)


@functools.cache
def _write_sums_function(tile: Tile):
    token_tiles, panels, feature_warps = tile.token_tiles, tile.panels, tile.feature_warps
    row_size = tile.features + SUM_PAD

    def write_sums(shared, totals):
        lane, warp = int32(cuda.threadIdx.x) % int32(WARP), int32(cuda.threadIdx.x) // int32(WARP)
        g, q = lane // int32(4), lane % int32(4)
        token = warp // int32(feature_warps) * int32(token_tiles * ROW_TILE) + g
        start = token * int32(row_size) + warp % int32(feature_warps) * int32(panels * OUT_TILE) + q * int32(2)
        for t in range(token_tiles):
            for p in range(panels):
                i, at = (t * panels + p) * 4, start + int32(t * (ROW_TILE * row_size) + p * OUT_TILE)
                shared[at], shared[at + 1] = totals[i], totals[i + 1]
                at += int32(8 * row_size)
                shared[at], shared[at + 1] = totals[i + 2], totals[i + 3]

    return device_function(write_sums)


@functools.cache
def _store_function(dtype: str, tile: Tile, epilogue: str):
    steps, tile_tokens, tile_features = epilogue_of(dtype, epilogue), tile.tokens, tile.features
    locate, find, finish, read, put = steps.locate, steps.find, steps.finish, steps.read, steps.put
    warps, row_size = tile.warps, tile.features + SUM_PAD

    def store(target, sums, weights, layer, width, first, count, first_feature):
        lane, warp = int32(cuda.threadIdx.x) % int32(WARP), int32(cuda.threadIdx.x) // int32(WARP)
        values, before = cuda.local.array(ROWS_AT_ONCE, float32), cuda.local.array(ROWS_AT_ONCE, float32)
        places = cuda.local.array(ROWS_AT_ONCE, int64)
        stop = min(int32(count), int32(first + int32(tile_tokens)))
        for column in range(lane, int32(tile_features), int32(WARP)):
            feature = int32(first_feature + column)
            if feature < weights.features:
                place = locate(target, weights, layer, feature)
                token, at = int32(first + warp), uint32(warp * int32(row_size) + column)
                while token < stop:
                    for i in range(ROWS_AT_ONCE):  # past the last token, the last: no branch
                        own = min(int32(token + int32(i * warps)), int32(stop - 1))
                        places[i] = find(target, layer, width, own, place)
                    for i in range(ROWS_AT_ONCE):
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

    return device_function(store)
