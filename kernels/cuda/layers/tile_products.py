"""A tile's step of K from shared memory: products of a lane, the sums of runs, and the tile's sums.

`product_functions` returns the number of a lane's sums, and:
    multiply (sums, stage, zero): add a step's products
    add_segment (totals, sums): add a run's sums
    write_sums (shared, totals): write the sums (tokens, features) of the tile, in rows of `row_size`
"""

import functools

from numba import cuda, float32, int32, uint32

from ..jit import (
    ALL_LANES,
    WARP,
    bits_to_float32,
    device_function,
    lane_and_warp,
    load_shared,
    unrolled,
)
from ..params import DTYPES, LOAD_BYTES, OUT_TILE, STEP, STEP_SIZE, Dtype
from .linear import ROW_TILE
from .tiles import EXCHANGE, Tile


@functools.cache
def product_functions(dtype: str, tile: Tile):
    return (_mma_functions if DTYPES[dtype].numbers.has_mma else _fma_functions)(dtype, tile)


def _mma_functions(dtype: str, tile: Tile):
    load_panels = _load_panels_function(DTYPES[dtype], tile.panels)
    mma = DTYPES[dtype].numbers.mma
    token_tiles = tile.token_tiles
    panels = tile.panels
    feature_warps = tile.feature_warps
    row_bytes = STEP * 2
    input_bytes = tile.input_bytes(dtype)
    panel_bytes = STEP_SIZE * DTYPES[dtype].item_bytes
    words_size = panels * 4
    sums_size = tile.lane_sums
    row_size = tile.row_size

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
            a = load_shared(inputs_at + uint32(t * (ROW_TILE * row_bytes)))
            b = load_shared(inputs_at + uint32(t * (ROW_TILE * row_bytes) + 8 * row_bytes))
            low = uint32(a[0] | zero), uint32(b[0] | zero), uint32(a[1] | zero), uint32(b[1] | zero)
            high = uint32(a[2] | zero), uint32(b[2] | zero), uint32(a[3] | zero), uint32(b[3] | zero)
            multiply_panels(sums, t, low, words, 0)
            multiply_panels(sums, t, high, words, 2)

    @device_function
    def place():
        """Return the first token and the first panel of a lane, and q."""
        (lane, warp) = lane_and_warp()
        token = warp // feature_warps * (token_tiles * ROW_TILE) + lane // 4
        return token, warp % feature_warps * panels, lane % 4

    def multiply(sums, stage, zero):
        token, panel, q = place()
        chunk = q ^ (token % 2 * EXCHANGE)
        row = stage + uint32(token * row_bytes)
        lane = cuda.threadIdx.x % WARP
        weights_at = stage + uint32(input_bytes + panel * panel_bytes + lane * LOAD_BYTES)
        packed = cuda.local.array(words_size, uint32)
        words = cuda.local.array(words_size, uint32)
        load_panels(words, packed, weights_at, 0)
        multiply_half(sums, words, row + uint32(chunk * LOAD_BYTES), zero)
        load_panels(words, packed, weights_at, 1)
        multiply_half(sums, words, row + uint32((chunk ^ EXCHANGE) * LOAD_BYTES), zero)

    def add_segment(totals, sums):
        for i in range(sums_size):
            totals[i] += sums[i]

    def write_sums(shared, totals):
        token, panel, q = place()
        start = token * row_size + panel * OUT_TILE + q * 2
        for t in range(token_tiles):
            for p in range(panels):
                i = (t * panels + p) * 4
                at = start + int32(t * (ROW_TILE * row_size) + p * OUT_TILE)
                shared[at] = totals[i]
                shared[at + 1] = totals[i + 1]
                at += 8 * row_size
                shared[at] = totals[i + 2]
                shared[at + 1] = totals[i + 3]

    return sums_size, *map(device_function, (multiply, add_segment, write_sums))


@functools.cache
def _load_panels_function(dtype: Dtype, panels: int):
    """Load half a step's weights as operands of mma; packed: a step's, which `expand` takes."""
    half_bytes = STEP_SIZE
    expand = dtype.expand

    def load_operands(words, packed, address, half):
        for p in range(panels):
            loaded = load_shared(address + uint32((p * 2 + half) * half_bytes))
            for i in range(4):
                words[p * 4 + i] = loaded[i]

    def load_packed(words, packed, address, half):
        for p in range(panels):
            if half == 0:
                loaded = load_shared(address + uint32(p * half_bytes))
                for i in range(4):
                    packed[p * 4 + i] = loaded[i]
            first = expand(packed[p * 4 + half * 2])
            second = expand(packed[p * 4 + half * 2 + 1])
            words[p * 4], words[p * 4 + 1] = first
            words[p * 4 + 2], words[p * 4 + 3] = second

    return device_function(load_packed if expand else load_operands)


def _fma_functions(dtype: str, tile: Tile):
    """Give a lane each second token, each fourth feature, and each fourth four of K, from its own on.

    Of four tokens, lane q holds q, q ^ 1, q ^ 2 and q ^ 3 in this order, and keeps the first. Lanes lie so that two of
    each load have one address: half a warp then takes one turn of shared memory, from compute capability 7.0 on.
    """
    rows = tile.token_tiles * ROW_TILE // 2
    columns = 2 * tile.panels
    feature_warps = tile.feature_warps
    row_bytes = STEP * 4
    panel_bytes = STEP_SIZE * 4
    part_bytes = WARP * LOAD_BYTES
    input_bytes = tile.input_bytes(dtype)
    row_size = tile.row_size
    words_size = 4 * columns

    @device_function
    def multiply_four(i, sums, words, first):
        q = int32(cuda.threadIdx.x) // int32(4) % int32(4)
        for j in range(4):
            row = first + uint32((q ^ j) * (2 * row_bytes))
            x = load_shared(row + uint32(4 * i * (2 * row_bytes)))
            for c in range(columns):
                at = (4 * i + j) * columns + c
                for k in range(4):
                    sums[at] = cuda.fma(words[c * 4 + k], bits_to_float32(x[k]), sums[at])

    @device_function
    def add_four(i, totals, sums):
        for c in range(columns):
            at = 4 * i * columns + c
            near = sums[at] + _from_lane(sums[at + columns], 4)
            far = sums[at + 2 * columns] + _from_lane(sums[at + 3 * columns], 4)
            totals[i * columns + c] += near + _from_lane(far, 8)

    multiply_rows = unrolled(multiply_four, rows // 4)
    add_segment = unrolled(add_four, rows // 4)

    @device_function
    def place():
        """Return the first token and the first feature of a lane, and q."""
        (lane, warp) = lane_and_warp()
        token = warp // feature_warps * (2 * rows) + lane // int32(2) % int32(2)
        feature = lane // int32(16) * int32(2) + lane % int32(2)
        return token, warp % feature_warps * (4 * columns) + feature, lane // int32(4) % int32(4)

    def multiply(sums, stage, zero):
        words = cuda.local.array(words_size, float32)
        (token, feature, q) = place()
        row = stage + uint32(token * row_bytes + q * LOAD_BYTES)
        panel = feature // int32(OUT_TILE)
        column = feature % int32(OUT_TILE)
        weights_at = stage + uint32(input_bytes + panel * panel_bytes + (4 * column + q) * LOAD_BYTES)
        for part in range(int32(0), int32(4)):
            for c in range(columns):
                at = part * int32(part_bytes) + int32(c // 2 * panel_bytes + c % 2 * (part_bytes // 2))
                loaded = load_shared(weights_at + uint32(at))
                for k in range(4):
                    words[c * 4 + k] = bits_to_float32(loaded[k])
            chunk = (part ^ token % int32(2)) * int32(EXCHANGE * LOAD_BYTES)
            multiply_rows(sums, words, row + uint32(chunk))

    def write_sums(shared, totals):
        token, feature, q = place()
        for i in range(rows // 4):
            for c in range(columns):
                shared[(token + 2 * (4 * i + q)) * row_size + feature + 4 * c] = totals[i * columns + c]

    return rows * columns, device_function(multiply), add_segment, device_function(write_sums)


@device_function
def _from_lane(value, distance):
    return cuda.shfl_xor_sync(uint32(ALL_LANES), value, distance)
