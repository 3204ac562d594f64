"""Quantizing to the last bit against NumPy, and the tiles against sums of integers, at the ends of their ranges."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.kernel_tools import (
    SHAPES,
    aligned,
    bfloat16_bits,
    from_bits,
    operand_of,
    packed,
    random_values,
    same_bits,
    unpacked,
    unwritten,
)
from tinygpt.kernels import numbers
from tinygpt.kernels.cpu.dtypes import DTYPES, new_weight, panel_count
from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.layers.operands import from_bfloat16, to_bfloat16
from tinygpt.kernels.cpu.packing import SHARES
from tinygpt.kernels.cpu.simd import products, tiles
from tinygpt.kernels.cpu.simd.grouped_tiles import expand_int4, expand_int8, tile_int4, tile_int8
from tinygpt.kernels.cpu.simd.targets import TARGET
from tinygpt.kernels.cpu.simd.tiles import LINE_BYTES, OUT_TILE, ROW_TILE
from tinygpt.kernels.cpu.simd.vector_ir import LANES, SCALE_GROUP, WEIGHT_GROUP
from tinygpt.weights.config import PRECISIONS

F32 = np.float32
ZERO_BELOW = 2.0**-120  # written out: a change of the kernels' own number must be seen
SIZES = [F32(1e-30), F32(1), F32(1e30)]
WIDTHS = [1, 31, WEIGHT_GROUP, 33, SCALE_GROUP, SCALE_GROUP + 1, 3 * SCALE_GROUP - 5]
WEIGHTS = pytest.mark.parametrize("shape", [*((OUT_TILE + 7, k) for k in WIDTHS), *SHAPES])


def weights_of(shape, size) -> np.ndarray:
    """Random rows, and rows of one value."""
    weight = random_values(*shape, seed=shape[1]) * size
    weight[3:4] = 0
    weight[4:5] = -size
    weight[5:6] = size
    return weight


@jit
def round_all(x, bits, back):
    for i in range(x.size):
        bits[i] = to_bfloat16(x[i])
        back[i] = from_bfloat16(bits[i])


def rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    bits = np.zeros(x.size, np.uint16)
    back = unwritten(x.size)
    round_all(x, bits, back)
    return bits, back


def test_every_bfloat16_is_kept_as_it_is():
    every = np.arange(1 << 16, dtype=np.uint16)
    x = from_bits(every)
    bits, back = rounded(x)
    is_number = ~np.isnan(x)
    np.testing.assert_array_equal(bits[is_number], every[is_number])
    same_bits(back[is_number], x[is_number])
    assert np.isnan(back[~is_number]).all()


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_kernels_and_numpy_round_to_the_same_bfloat16(low):
    """NaN stays NaN: of 0x7F800001 as of 0x7FFFFFFF and 0xFFFFFFFF."""
    x = (np.arange(1 << 16, dtype=np.uint32) << 16 | low).view(F32)
    bits = numbers.to_bfloat16(x)
    np.testing.assert_array_equal(bits, rounded(x)[0])
    assert set(bits[np.isnan(x)].tolist()) == {0x7FC0}
    assert not np.isnan(numbers.from_bfloat16(bits)[~np.isnan(x)]).any()


@pytest.mark.parametrize(("low", "goes_up"), [(1, False), (0x7FFF, False), (0x8000, None), (0x8001, True)])
def test_between_two_bfloat16_the_nearest_is_taken(low, goes_up):
    """`None`: half-way, to the even one. Above the greatest there is infinity."""
    below = np.arange(1 << 16, dtype=np.uint32)
    below = below[(below & 0x7F80) != 0x7F80]  # neither infinity nor NaN
    bits, _ = rounded((below << 16 | low).view(F32))
    up = below & 1 == 1 if goes_up is None else goes_up
    np.testing.assert_array_equal(bits, (below + up).astype(np.uint16))


def float16_of_all(kind: str) -> np.ndarray:
    """Every float16; numbers half-way between two; or float32s of all sizes, beyond float16's too."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(F32)
    if kind == "every":
        return every
    finite = np.sort(every[np.isfinite(every)])
    if kind == "half-way":
        return (finite[1:] + finite[:-1]) / 2
    return (np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8001).view(F32)


@pytest.mark.parametrize("kind", ["every", "half-way", "any"])
def test_weights_are_rounded_to_the_nearest_float16(kind):
    weight = float16_of_all(kind)
    weight = np.resize(weight, (len(weight) // 256, 256))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = weight.astype(np.float16).astype(float)
    np.testing.assert_array_equal(unpacked(packed(weight, "float16"), "float16")[: len(weight)], expected)


def test_what_is_not_finite_stays_so_in_bfloat16_weights():
    weight = random_values(5, 35)
    weight[1, 2] = np.nan
    weight[2, 3] = np.inf
    weight[3, 34] = -np.inf
    values = unpacked(packed(weight, "bfloat16"), "bfloat16")[:5, :35]
    assert np.isnan(values[1, 2])
    assert (values[2, 3], values[3, 34]) == (np.inf, -np.inf)
    assert np.isfinite(values).sum() == values.size - 3


@pytest.mark.parametrize("size", SIZES)
@WEIGHTS
def test_int8_weights(shape, size):
    """The largest of a row is 127 steps of its scale; every other weight is the nearest whole number of them."""
    weight, k = weights_of(shape, size), shape[1]
    record = packed(weight, "int8")
    largest = np.abs(weight).max(axis=1)  # (N,)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, F32(127) / largest, F32(0))
    # In float32 the product is rounded, then its nearest whole number.
    codes = np.rint(weight * inverse[:, None])
    same_bits(record.scales[0, : len(weight)].copy(), largest / F32(127))
    np.testing.assert_array_equal(levels_of(record)[: len(weight), :k], codes)
    assert not levels_of(record)[len(weight) :].any()
    assert not levels_of(record)[:, k:].any()
    assert not record.scales[0, len(weight) :].any()


def levels_of(record) -> np.ndarray:
    """-127 to 127, (P * OUT_TILE, K rounded up)."""
    panels = record.panels[0].astype(int).transpose(0, 2, 1, 3)  # (P, OUT_TILE, K / 4, 4)
    return panels.reshape(panels.shape[0] * OUT_TILE, -1) - 128


def test_int8_weights_half_way_go_to_the_even_level():
    weight = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]], F32)
    assert levels_of(packed(weight, "int8"))[0, :8].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


@given(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=2 * SCALE_GROUP), st.sampled_from(SIZES))
def test_int8_activations(values, size):
    x = np.array([values, values[::-1]], F32) * size
    check_activations(x)


@pytest.mark.parametrize("n", WIDTHS)
def test_int8_activations_at_the_ends_of_their_range(n):
    rows = [np.zeros(n), np.full(n, 3.4e38), np.full(n, -1e-30), np.arange(n) - n / 2]
    check_activations(np.array([*rows, np.r_[127, np.arange(n - 1) + 0.5]], F32))


@pytest.mark.parametrize("n", [SCALE_GROUP, SCALE_GROUP - 3])
def test_a_group_of_next_to_nothing_is_one_of_zeros(n):
    """The border itself, the next number on either side of it, and half of it."""
    border = F32(ZERO_BELOW)
    sizes = [border, np.nextafter(border, F32(0)), np.nextafter(border, F32(1)), border / 2, border * 2]
    x = np.array(sizes, F32)[:, None] * np.linspace(-1, 0.5, n, dtype=F32)
    check_activations(x)
    assert operand_of(x, "int8").values.any(axis=1).tolist() == [True, False, True, False, True]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [2, SCALE_GROUP + 3])  # in a whole group, and in a part of one
def test_a_group_that_is_not_finite_has_nan_as_its_scale(place, value):
    """Not infinity: ReLU would make 0 of a product of -infinity."""
    x = random_values(2, SCALE_GROUP + 5)
    x[1, place] = value
    scales = operand_of(x, "int8").scales
    has_nan = np.zeros((2, 2), bool)
    has_nan[1, place // SCALE_GROUP] = True
    np.testing.assert_array_equal(np.isnan(scales[:, :, 0]), has_nan)
    np.testing.assert_array_equal(np.isnan(scales[:, :, 2:].view(F32)).all(axis=2), has_nan)


def check_activations(x: np.ndarray) -> None:
    """Each group of each row by itself; x * (127 / largest) is rounded once, the division apart."""
    operand = operand_of(x, "int8")
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % SCALE_GROUP))).reshape(len(x), -1, SCALE_GROUP)
    largest = np.abs(padded).max(axis=2)  # (M, G)
    largest = np.where(largest < ZERO_BELOW, F32(0), largest)  # so that 127 / largest is finite
    inverse = np.divide(F32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    codes = np.rint(padded.astype(float) * inverse[:, :, None].astype(float))  # (M, G, SCALE_GROUP)
    np.testing.assert_array_equal(operand.values.reshape(codes.shape), codes)
    same_bits(operand.scales[:, :, 0].copy(), largest / F32(127))


@pytest.mark.parametrize("size", [F32(1e-18), F32(1), F32(1e18)])  # errors are squared, in float32
@WEIGHTS
def test_int4_weights(shape, size):
    """Nearest levels of a scale and an offset that are the best of the shares of the range that are tried."""
    weight, k = weights_of(shape, size), shape[1]
    groups = np.pad(weight, ((0, 0), (0, -k % WEIGHT_GROUP))).reshape(len(weight), -1, WEIGHT_GROUP)
    record = packed(weight, "int4")
    scale, offset = (part[: len(weight), : groups.shape[1], None] for part in scales_of(record))
    levels = int4_levels_of(record)[: len(weight), : groups.shape[1]]
    missed = np.abs(levels * scale + offset - groups)
    nearest = np.abs(nearest_levels(groups, scale, offset) * scale + offset - groups)
    assert (missed <= nearest + 1e-5 * scale).all()
    error = (missed**2).sum(axis=2)
    for share in SHARES:
        other_scale, other_offset = plain_scales(groups, share)
        other = np.abs(
            nearest_levels(groups, other_scale, other_offset) * other_scale + other_offset - groups
        )
        assert (error <= (other**2).sum(axis=2) * (1 + 1e-4)).all()


def scales_of(record) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets, (P * OUT_TILE, K / WEIGHT_GROUP) each."""
    values = from_bits(record.group_scales[0]).astype(float).transpose(2, 0, 3, 1)  # (2, P, OUT_TILE, groups)
    return tuple(values.reshape(2, -1, values.shape[-1]))


def int4_levels_of(record) -> np.ndarray:
    """0 to 15, (P * OUT_TILE, K / WEIGHT_GROUP, WEIGHT_GROUP)."""
    panels = record.panels[0].astype(int)  # (P, K / 8, OUT_TILE, 4)
    both = np.stack([panels & 15, panels >> 4], axis=2).transpose(0, 3, 1, 2, 4)  # (P, OUT_TILE, K / 8, 2, 4)
    return both.reshape(len(panels) * OUT_TILE, -1, WEIGHT_GROUP)


def nearest_levels(groups, scale, offset) -> np.ndarray:
    return np.clip(np.rint((groups - offset) / scale), 0, 15)


def plain_scales(groups: np.ndarray, share: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """16 levels over the middle `share` of the range from least to largest, 0 included, kept as bfloat16."""
    low = np.minimum(groups.min(axis=2), 0)
    high = np.maximum(groups.max(axis=2), 0)
    step = (high - low) * share / F32(15)
    middle = (high + low) * F32(0.5)
    offset = from_bits(bfloat16_bits(middle - F32(7.5) * step))
    scale = np.where(step > 1e-30, from_bits(bfloat16_bits(step)), F32(1))
    return scale[:, :, None].astype(float), offset[:, :, None].astype(float)


EXPANDS_INT8 = products.INT8.expands


@jit
def int8_tile(rows, a, lda, scales, lds, b, b_scales, groups, c, expanded):
    if rows > 1 and EXPANDS_INT8:
        expand_int8(b, groups, expanded)
        b = expanded
    tile_int8(rows, a, lda, scales, lds, b, b_scales, groups, c, b, LINE_BYTES)


@jit
def int4_tile(rows, a, lda, scales, lds, b, b_scales, groups, c, expanded):
    if rows > 1:
        expand_int4(b, groups, expanded)
        b = expanded
    tile_int4(rows, a, lda, scales, lds, b, b_scales, groups, c, b, LINE_BYTES)


GROUPED = {"int8": (int8_tile, products.INT8), "int4": (int4_tile, products.INT4)}


class Grouped:
    """Random inputs of a grouped tile; `ends` are drawn from the ends of their ranges only."""

    def __init__(self, dtype: str, rows: int, groups: int, ends: bool):
        random = np.random.default_rng(rows * 10 + groups)
        self.dtype = dtype
        self.rows = rows
        self.groups = groups
        draw = (lambda low, high, shape: random.choice([low, high], shape)) if ends else random.integers
        self.a = draw(-127, 127, (rows, groups + 1, SCALE_GROUP)).astype(np.int8)  # a group more than is read
        top = 255 if dtype == "int8" else 15
        self.levels = draw(0, top, (groups * SCALE_GROUP, OUT_TILE)).astype(np.uint8)
        self.scales = np.exp2(random.uniform(-20, 20, (rows, groups + 1))).astype(F32)
        shape = (groups * SCALE_GROUP // WEIGHT_GROUP, 2, OUT_TILE)
        self.b_scales = bfloat16_bits(np.exp2(random.uniform(-10, 1, shape)) * random.choice([-1, 1], shape))
        self.before = random_values(rows, OUT_TILE)
        if rows > 1:
            self.a[1], self.scales[1] = 0, 0  # what a row of zeros becomes

    def operand(self) -> np.ndarray:
        """(rows, groups + 1, 4): what the tile reads beside `a`."""
        halves = self.a.reshape(self.rows, -1, 2, SCALE_GROUP // 2).sum(axis=3, dtype=np.int32)
        scales = unwritten(*self.scales.shape, 4)
        scales[:, :, 0] = self.scales
        scales.view(np.int32)[:, :, 1] = -128 * halves.sum(axis=2)
        scales[:, :, 2:] = self.scales[:, :, None] * halves.astype(F32)
        return scales

    def panel(self) -> np.ndarray:
        fours = self.levels.reshape(-1, 4, OUT_TILE).transpose(0, 2, 1)  # (K / 4, OUT_TILE, 4)
        return aligned(fours if self.dtype == "int8" else fours[::2] | fours[1::2] << 4)

    def run(self) -> np.ndarray:
        scales = self.operand()
        b = self.panel()
        b_scales = aligned(self.b_scales)
        c = unwritten(self.rows + 1, OUT_TILE)
        c[: self.rows] = self.before
        tile, kind = GROUPED[self.dtype]
        a = self.a.astype(f"i{kind.operand_bytes}")
        expanded = aligned(np.repeat(b, kind.expansion))
        where = (b.ctypes.data, b_scales.ctypes.data, self.groups, c.ctypes.data, expanded.ctypes.data)
        tile(self.rows, a.ctypes.data, a.strides[0], scales.ctypes.data, scales.strides[0], *where)
        assert np.isnan(c[self.rows]).all()
        return c[: self.rows].copy()

    def expected(self) -> np.ndarray:
        """Integers add up exactly; float64 holds what a fused multiply-add rounds once."""
        c = self.before
        for g in range(self.groups):
            c = (self.int8_group if self.dtype == "int8" else self.int4_group)(g, c)
        return c

    def int8_group(self, g: int, c: np.ndarray) -> np.ndarray:
        weights = self.levels[g * SCALE_GROUP : (g + 1) * SCALE_GROUP].astype(int) - 128
        return fused(self.a[:, g].astype(int) @ weights, self.scales[:, g, None], c)

    def int4_group(self, g: int, c: np.ndarray) -> np.ndarray:
        for half in range(SCALE_GROUP // WEIGHT_GROUP):
            number = g * (SCALE_GROUP // WEIGHT_GROUP) + half
            part = slice(half * WEIGHT_GROUP, (half + 1) * WEIGHT_GROUP)
            weights = self.levels[number * WEIGHT_GROUP : (number + 1) * WEIGHT_GROUP].astype(int)
            scaled = (self.a[:, g, part].astype(int) @ weights).astype(F32) * self.scales[:, g, None]
            scale, offset = from_bits(self.b_scales[number])
            c = fused(self.operand()[:, g, 2 + half, None], offset, fused(scaled, scale, c))
        return c


def fused(x, y, z) -> np.ndarray:
    return (x.astype(float) * y.astype(float) + z).astype(F32)


@pytest.mark.parametrize("ends", [False, True], ids=["any", "ends"])
@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("rows", range(1, ROW_TILE + 1))
@pytest.mark.parametrize("dtype", GROUPED)
def test_grouped_tiles(dtype, rows, groups, ends):
    case = Grouped(dtype, rows, groups, ends)
    same_bits(case.run(), case.expected())


@jit
def bf16_tile(like, rows, vectors, a, lda, b, ldb, steps, c, ldc):
    tiles.panel_tile(like, rows, vectors, a, lda, b, ldb, steps, c, ldc, b, LINE_BYTES)


@pytest.mark.parametrize("steps", [1, 2, 35, 64])
@pytest.mark.parametrize("vectors", range(1, OUT_TILE // LANES + 1))
@pytest.mark.parametrize("rows", range(1, ROW_TILE + 1))
def test_a_tile_of_bfloat16_pairs(rows, vectors, steps):
    """A panel's first columns. Exact where every sum is a whole number; else near float64, in any order of a pair."""
    random = np.random.default_rng(steps)
    for a, b in (
        (random.integers(-8, 9, (rows, 2 * steps)), random.integers(-8, 9, (2 * steps, OUT_TILE))),
        (random.standard_normal((rows, 2 * steps)), random.standard_normal((2 * steps, OUT_TILE))),
    ):
        a_bits = bfloat16_bits(a)
        b_bits = bfloat16_bits(b)
        c = unwritten(rows + 1, OUT_TILE)
        left = a_bits if TARGET.multiplies_bfloat16 else from_bits(a_bits)
        pairs = aligned(b_bits.reshape(steps, 2, OUT_TILE).transpose(0, 2, 1))
        where = (
            left.ctypes.data,
            left.strides[0],
            pairs.ctypes.data,
            OUT_TILE * 4,
            steps,
            c.ctypes.data,
            c.strides[0],
        )
        bf16_tile(pairs, rows, vectors, *where)
        exact_a = from_bits(a_bits).astype(float)
        exact_b = from_bits(b_bits).astype(float)
        expected = exact_a @ exact_b
        scale = np.abs(exact_a) @ np.abs(exact_b)
        is_whole = np.issubdtype(a.dtype, np.integer)
        columns = vectors * LANES
        limit = 0 if is_whole else 2.0**-20 * scale
        assert (np.abs(c[:rows] - expected) <= limit)[:, :columns].all()
        assert np.isnan(c[rows]).all()
        assert np.isnan(c[:, columns:]).all()


@pytest.mark.parametrize(("dtype", "k"), list(itertools.product(DTYPES, WIDTHS)))
def test_arrays_have_the_sizes_that_the_tiles_read(dtype, k):
    """Nothing is missing for K that is no multiple of a group, nor for columns that fill no panel."""
    values = unpacked(packed(np.ones((OUT_TILE + 1, k), F32), dtype), dtype)
    unit = DTYPES[dtype].k_unit
    assert values.shape == (panel_count(OUT_TILE + 1) * OUT_TILE, -(-k // unit) * unit)
    assert (np.abs(values[: OUT_TILE + 1, :k] - 1) < 0.01).all()
    assert not values[OUT_TILE + 1 :].any()


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_reports_say_what_kernels_compute_in(dtype):
    row = DTYPES[dtype]
    precision = PRECISIONS[dtype]
    assert (precision.head, precision.kv_cache) == (row.head, row.kv_cache)
    record = new_weight(dtype, 1, 10 * OUT_TILE, 64 * SCALE_GROUP)
    of_columns = 0 if dtype != "int8" else record.scales.nbytes
    assert sum(array.nbytes for array in record) - of_columns == precision.bytes * 640 * 4096
    x = np.ones((2, 3), np.float32)
    assert (row.operand_of(x).values is x) == (precision.activations == "float32")
