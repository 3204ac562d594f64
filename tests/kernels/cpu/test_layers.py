"""Tiles, reductions, activations, layer norm and embedding, each alone, against NumPy.

The shapes fit no vector, no tile and no block. The matrix product is in test_linear.py, attention in
test_attention.py.
"""

import math

import numpy as np
import pytest

from support.kernel_tools import (
    ACTIVATIONS,
    EPS,
    SHAPES,
    aligned,
    check,
    operand_of,
    packed,
    random_values,
    same_bits,
    solo_team,
    unpacked,
    unwritten,
    warpers_of,
)
from tinygpt.kernels.cpu.arrays import Norm
from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.layers import activations
from tinygpt.kernels.cpu.layers.operands import Float32Operand, Int8Operand, put, quantize_rows
from tinygpt.kernels.cpu.layers.rows import embed_tokens, layer_norm
from tinygpt.kernels.cpu.sampling import NO_NUMBERS, sample
from tinygpt.kernels.cpu.sampling_rows import SCAN_BLOCK, greatest
from tinygpt.kernels.cpu.simd import tiles
from tinygpt.kernels.cpu.simd.tiles import LINE_BYTES, OUT_TILE, ROW_TILE
from tinygpt.kernels.cpu.simd.vector_ir import (
    LANES,
    add_rows,
    address,
    float32_at,
    fma,
    max_lanes,
    put_rows,
    sum_2_segments,
    sum_4_segments,
    sum_lanes,
    sum_squares_lanes,
)
from tinygpt.kernels.cpu.workspace import new_operand
from tinygpt.kernels.reference import layers as reference

# Tiles and reductions: raw addresses.


@jit
def call_panel(like, rows, a, lda, b, ldb, steps, c, ldc):
    tiles.panel_tile(like, rows, like.shape[1] // LANES, a, lda, b, ldb, steps, c, ldc, b, LINE_BYTES)


@jit
def call_panel_add(like, rows, a, lda, b, ldb, steps, c, ldc):
    tiles.panel_add(like, rows, a, lda, b, ldb, steps, c, ldc, b, LINE_BYTES)


@jit
def call_strip_add(like, rows, a, lda, b, ldb, steps, c, ldc):
    tiles.strip_add(like, rows, a, lda, b, ldb, steps, c, ldc, b, LINE_BYTES)


TILES = [(call_panel, columns, False) for columns in range(LANES, OUT_TILE + 1, LANES)]
TILES += [(call_panel_add, OUT_TILE, True), (call_strip_add, LANES, True)]


@pytest.mark.parametrize(("tile", "columns", "adds"), TILES)
@pytest.mark.parametrize("steps", [1, 2, 35, 130])
@pytest.mark.parametrize("rows", range(1, ROW_TILE + 1))
def test_tiles_accumulate_one_chain_in_the_order_of_k(rows, steps, tile, columns, adds):
    """To the bit: each step is one fused multiply-add, whose product float64 holds exactly."""
    a = random_values(rows, steps + 3)
    b = random_values(steps, columns, seed=1)
    c = unwritten(rows + 1, columns + 1)  # a row and a column more than the tile may touch
    expected = np.zeros((rows, columns), np.float32)
    if adds:
        expected = c[:rows, :columns] = random_values(rows, columns, seed=2)
    for k in range(steps):
        expected = (a[:, k, None].astype(np.float64) * b[k] + expected).astype(np.float32)
    stored = aligned(b)
    places = [part for array in (a, stored) for part in (array.ctypes.data, array.strides[0])]
    tile(stored, rows, *places, steps, c.ctypes.data, c.strides[0])
    same_bits(c[:rows, :columns].copy(), expected)
    assert np.isnan(c[rows:]).all()
    assert np.isnan(c[:, columns:]).all()


@jit
def reductions_of(x, out):
    vectors = x.size // LANES
    out[0] = sum_lanes(address(x), vectors)
    out[1] = sum_squares_lanes(address(x), vectors)
    out[2] = max_lanes(address(x), vectors)


@jit
def fused(x, y, z):
    return fma(x, y, z)


@pytest.mark.parametrize("vectors", [1, 2, 3, 9])
def test_reductions(vectors):
    for seed in range(10):
        x = random_values(vectors * LANES, seed=seed)
        out = unwritten(3)
        reductions_of(x, out)
        exact = x.astype(np.float64)
        check("sum", out[0], exact.sum(), np.abs(exact).sum())
        check("sum", out[1], (exact**2).sum(), (exact**2).sum())
        assert out[2] == x.max()


def test_reductions_meet_every_place_and_infinity():
    for place in range(3 * LANES):
        x = np.full(3 * LANES, -np.inf, np.float32)
        out = unwritten(3)
        x[place] = -7
        reductions_of(x, out)
        assert out[2] == -7
        x[:] = 0
        x[place] = -7
        reductions_of(x, out)
        assert out.tolist() == [-7, 49, 0]


def test_fma_rounds_once():
    x = np.float32(1 + 2**-12)
    rounded = np.float32(1 + 2**-11)
    assert x * x == rounded
    assert fused(x, x, -rounded) == 2.0**-24


def test_exp():
    x = np.concatenate([np.linspace(-86.9, 80, 20001), [0, 1e-10, -1e-10]]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    check("exp", [activations.exp(v) for v in x], exact, exact)
    for low in (-1000, -87.5, -np.inf):
        assert activations.exp(np.float32(low)) == 0
    for high in (89, 1e4, np.inf):
        assert activations.exp(np.float32(high)) == activations.exp(np.float32(80))
    assert activations.exp(np.float32(0)) == 1
    assert math.isnan(activations.exp(np.float32(np.nan)))


@pytest.mark.parametrize("name", ["tanh", "erf"])
def test_tanh_and_erf(name):
    function = getattr(activations, name)
    exact = getattr(math, name)
    x = np.concatenate([np.linspace(-12, 12, 10001), np.linspace(-1, 1, 10001), [1e4, -1e4]]).astype(
        np.float32
    )
    actual = np.array([function(v) for v in x])
    expected = np.array([exact(v) for v in x])
    check(name, actual, expected, np.maximum(np.abs(expected), EPS) if name == "tanh" else 1)
    np.testing.assert_array_equal(actual, -np.array([function(-v) for v in x]))
    assert np.abs(actual).max() == 1
    assert math.isnan(function(np.float32(np.nan)))


@ACTIVATIONS
def test_activations(name, kind):
    x = np.concatenate([np.linspace(-15, 15, 9997), [0, 1e-6, -1e-6, 300, -300, 1e4, -1e4]]).astype(
        np.float32
    )
    y = x.copy()
    activations.activate(y, kind)
    expected = reference.ACTIVATIONS[name](x.astype(np.float64)) if name != "none" else x
    check("activation", y, expected, np.maximum(np.maximum(np.abs(x), np.abs(expected)), 1))
    for start, stop in (
        (0, 1),
        (5, 22),
        (9990, 10004),
        (1, 10003),
    ):  # other places in a vector, another remainder
        part = x[start:stop].copy()
        activations.activate(part, kind)
        same_bits(part, y[start:stop])
    broken = np.full(37, np.nan, np.float32)
    activations.activate(broken, kind)
    assert np.isnan(broken).all()


def run_layer_norm(x, rows, weight, bias, epsilon=1e-5) -> np.ndarray:
    out = unwritten(len(rows), x.shape[1])
    normalize(Float32Operand(out), x, np.asarray(rows, np.int32), weight, bias, epsilon)
    return out


def normalize(out, x, rows, weight, bias, epsilon=1e-5) -> None:
    """As the second of two layers, the first of which is all NaN."""
    norm = Norm(*(np.stack([np.full_like(part, np.nan), part]) for part in (weight, bias)))
    layer_norm(solo_team(), out, x, rows, norm, np.int64(1), np.float32(epsilon))


@pytest.mark.parametrize("epsilon", [1e-12, 1e-5, 0.1])
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm(shape, epsilon):
    x = random_values(*shape)
    weight = random_values(shape[1], seed=1)
    bias = random_values(shape[1], seed=2)
    rows = np.random.default_rng(3).integers(len(x), size=2 * len(x) + 1)  # any rows in any order, some twice
    centred = x[rows] - x[rows].mean(-1, keepdims=True, dtype=np.float64)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    scale = np.abs(weight) * np.sqrt(shape[1]) + np.abs(bias)
    check("layer_norm", run_layer_norm(x, rows, weight, bias, epsilon), normed * weight + bias, scale)


def test_layer_norm_of_a_constant_row_is_the_bias():
    bias = random_values(35)
    same_bits(run_layer_norm(np.full((3, 35), 7, np.float32), [2], random_values(35), bias), bias[None])


@pytest.mark.parametrize("rows", range(1, 14))
def test_a_row_of_layer_norm_has_the_same_bits_among_any_number(rows):
    x = random_values(13, 97)
    weight = random_values(97, seed=1)
    bias = random_values(97, seed=2)
    alone = [run_layer_norm(x, [row], weight, bias) for row in range(rows)]
    same_bits(run_layer_norm(x, range(rows), weight, bias), np.concatenate(alone))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_layer_norm_into_an_operand(dtype):
    x = random_values(13, 97)
    weight = random_values(97, seed=1)
    bias = random_values(97, seed=2)
    rows = np.array([3, 0, 12, 12], np.int32)
    operand = new_operand(dtype, len(rows), 97)
    normalize(operand, x, rows, weight, bias)
    for array, expected in zip(
        operand, operand_of(run_layer_norm(x, rows, weight, bias), dtype), strict=True
    ):
        np.testing.assert_array_equal(array.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize(("n", "width"), SHAPES)
def test_embed(n, width, dtype):
    vocab, length = 2 * OUT_TILE + 3, 11
    random = np.random.default_rng(0)
    token_ids = np.concatenate([[vocab - 1], random.integers(vocab, size=n - 1)]).astype(np.int32)
    positions = random.integers(length, size=n).astype(np.int32)
    wte = packed(random_values(vocab, width), dtype)
    wpe = random_values(length, width, seed=1)
    x = unwritten(n, width)
    factors = np.exp2(random.integers(-2, 3, width)).astype(np.float32)  # powers of 2 change no rounding
    embeds = random_values(n, width, seed=2)
    token_ids[1::3] = -1  # embeds stand for these
    embed_tokens(solo_team(), x, token_ids, embeds, positions, wte, factors, wpe)
    rows = unpacked(wte, dtype)[token_ids, :width].astype(np.float32)
    same_bits(x, np.where(token_ids[:, None] < 0, embeds, rows * factors) + wpe[positions])


SIZES = (1, 7, 64, SCAN_BLOCK - 1, SCAN_BLOCK, SCAN_BLOCK + 1, 3 * SCAN_BLOCK + 5)
ODD = np.array([0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-42, -1e-42, 3.4e38, -3.4e38], np.float32)


@jit
def greatest_of_rows(rows, token_ids):
    for r in range(rows.shape[0]):
        token_ids[r] = greatest(rows[r])


def assert_like_numpy(rows: np.ndarray) -> None:
    count = len(rows)
    found = np.empty(count, np.int32)
    greatest_of_rows(rows, found)
    assert found.tolist() == sample(rows, warpers_of(count, temperature=0), *NO_NUMBERS).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_the_greatest_of_any_values(size):
    random = np.random.default_rng(size)
    rows = random.standard_normal((40, size), np.float32)
    rows[10:] = np.round(rows[10:])  # with ties, which the first wins
    rows[20:] -= np.float32(100)  # all below 0
    assert_like_numpy(rows)


@pytest.mark.parametrize("size", SIZES)
def test_the_greatest_of_zeros_infinities_and_what_is_no_number(size):
    random = np.random.default_rng(size)
    few = random.choice(ODD, (60, size))
    few[20:] = np.where(random.random((40, size)) < 0.01, few[20:], np.float32(-1))
    few[40:] = random.choice(ODD[[0, 1, 3, 7, 9]], (20, size))  # nothing above 0, and 0 of either sign
    assert_like_numpy(np.concatenate((few, *(np.full((1, size), odd) for odd in ODD))))


# The last steps of a tile's result, to the bit: NaN, infinities and zeros of both signs among them.

EXTREMES = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38], np.float32)
STRANGERS = 5  # columns to each side of what is written


@jit
def run_rows(target, y, scales, biases, adds):
    stride, count = target.shape[1] * 4, y.shape[0]
    where = address(target) + STRANGERS * 4, stride, address(y), count, address(scales), address(biases)
    if adds:
        add_rows(*where)
    else:
        put_rows(*where)


@jit
def run_sum(segments, rows, scales):
    spacing = segments.shape[1] * OUT_TILE * 4
    if segments.shape[0] == 2:
        sum_2_segments(address(segments), spacing, rows, address(scales))
    else:
        sum_4_segments(address(segments), spacing, rows, address(scales))


@jit
def run_quantize(values, scales, x, factors, summands):
    sizes = values.shape[1] * values.itemsize, scales.shape[1] * 16
    where = address(values) + OUT_TILE * values.itemsize, sizes[0], address(scales) + 16, sizes[1]
    quantize_rows(values, address(x), x.shape[0], address(factors), address(summands), *where)


@jit
def run_put(operand, x):
    for row in range(x.shape[0]):
        put(operand, row, OUT_TILE, float32_at(address(x) + row * OUT_TILE * 4, OUT_TILE))


def panel_rows(rows: int, seed: int = 0) -> np.ndarray:
    y = random_values(rows, OUT_TILE, seed=seed)
    y[:, :: OUT_TILE // len(EXTREMES)] = EXTREMES
    return y


@pytest.mark.parametrize("rows", [1, 2, 7, 48])
@pytest.mark.parametrize("adds", [False, True])
def test_rows_are_scaled_and_biased(rows, adds):
    y = panel_rows(rows)
    scales = random_values(OUT_TILE, seed=1)
    biases = random_values(OUT_TILE, seed=2)
    shape = rows, OUT_TILE + 2 * STRANGERS
    target = random_values(*shape, seed=3) if adds else unwritten(*shape)
    expected = target.copy()
    inside = slice(STRANGERS, STRANGERS + OUT_TILE)
    finished = y * scales + biases
    expected[:, inside] = expected[:, inside] + finished if adds else finished
    run_rows(target, y, scales, biases, adds)
    same_numbers(target, expected)


def test_a_row_of_ones_and_one_of_negative_zeros_change_no_bit():
    y = panel_rows(3)
    target = unwritten(3, OUT_TILE + 2 * STRANGERS)
    run_rows(target, y, np.ones(OUT_TILE, np.float32), np.full(OUT_TILE, -0.0, np.float32), False)
    same_bits(target[:, STRANGERS:-STRANGERS], y)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("count", [2, 4])
def test_segments_are_scaled_and_added_in_pairs(count, rows):
    segments = random_values(count, 6, OUT_TILE)
    scales = random_values(OUT_TILE, seed=1)
    parts = [segment[:rows] * scales for segment in segments]
    expected = segments.copy()
    expected[0, :rows] = parts[0] + parts[1] if count == 2 else (parts[0] + parts[1]) + (parts[2] + parts[3])
    run_sum(segments, rows, scales)
    same_bits(segments, expected)


@pytest.mark.parametrize("kind", [np.int8, np.int16])
def test_rows_are_quantized_as_one_by_one(kind):
    x = random_values(7, OUT_TILE)
    factors = random_values(OUT_TILE, seed=1)
    summands = random_values(OUT_TILE, seed=2)
    x[2], x[3], x[4] = panel_rows(1), 0, -summands / factors * np.float32(1 + 1e-6)
    values = np.zeros((2, 7, 3 * OUT_TILE), kind)
    sizes = np.zeros((2, 7, 3, 4), np.float32)
    found, expected = map(Int8Operand, values, sizes)
    run_quantize(*found, x, factors, summands)
    run_put(expected, x * factors + summands)
    assert np.abs(expected.values[[0, 1, 5, 6], OUT_TILE : 2 * OUT_TILE]).max(1).tolist() == [127] * 4
    for one, other in zip(found, expected, strict=True):
        same_numbers(one, other)


def same_numbers(found: np.ndarray, expected: np.ndarray) -> None:
    """To the bit, but for which NaN it is."""
    np.testing.assert_array_equal(found, expected)
    if found.dtype == np.float32:
        np.testing.assert_array_equal(
            np.signbit(found[~np.isnan(found)]), np.signbit(expected[~np.isnan(expected)])
        )
