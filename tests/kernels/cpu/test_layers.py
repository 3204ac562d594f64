"""Tiles, reductions, activations, layer norm and embedding, each alone, against NumPy.

The shapes fit no vector, no tile and no block. The matrix product is in test_linear.py, attention in
test_attention.py.
"""

import math

import numpy as np
import pytest

from support.kernel_tools import (
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
)
from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.layers import activations
from tinygpt.kernels.cpu.layers.formats import Float32Operand, Norm
from tinygpt.kernels.cpu.layers.rows import embed_tokens, layer_norm
from tinygpt.kernels.cpu.packing.weights import DTYPES
from tinygpt.kernels.cpu.simd import tiles
from tinygpt.kernels.cpu.simd.tiles import LINE_BYTES, OUT_TILE, ROW_TILE
from tinygpt.kernels.cpu.simd.vector_ir import LANES, address, fma, max_lanes, sum_lanes, sum_squares_lanes
from tinygpt.kernels.cpu.workspace import new_operand
from tinygpt.kernels.reference import layers as reference

KINDS = [("none", activations.NONE), *activations.ACTIVATIONS.items()]
ACTIVATIONS = pytest.mark.parametrize(("name", "kind"), KINDS, ids=[name for name, _ in KINDS])
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
    a, b = random_values(rows, steps + 3), random_values(steps, columns, seed=1)
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
        x, out = random_values(vectors * LANES, seed=seed), unwritten(3)
        reductions_of(x, out)
        exact = x.astype(np.float64)
        check("sum", out[0], exact.sum(), np.abs(exact).sum())
        check("sum", out[1], (exact**2).sum(), (exact**2).sum())
        assert out[2] == x.max()


def test_reductions_meet_every_place_and_infinity():
    for place in range(3 * LANES):
        x, out = np.full(3 * LANES, -np.inf, np.float32), unwritten(3)
        x[place] = -7
        reductions_of(x, out)
        assert out[2] == -7
        x[:] = 0
        x[place] = -7
        reductions_of(x, out)
        assert out.tolist() == [-7, 49, 0]


def test_fma_rounds_once():
    x, rounded = np.float32(1 + 2**-12), np.float32(1 + 2**-11)
    assert x * x == rounded
    assert fused(x, x, -rounded) == 2.0**-24


# Activations.


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
    function, exact = getattr(activations, name), getattr(math, name)
    x = np.concatenate([np.linspace(-12, 12, 10001), np.linspace(-1, 1, 10001), [1e4, -1e4]]).astype(np.float32)
    actual, expected = np.array([function(v) for v in x]), np.array([exact(v) for v in x])
    check(name, actual, expected, np.maximum(np.abs(expected), EPS) if name == "tanh" else 1)
    np.testing.assert_array_equal(actual, -np.array([function(-v) for v in x]))
    assert np.abs(actual).max() == 1
    assert math.isnan(function(np.float32(np.nan)))


@ACTIVATIONS
def test_activate(name, kind):
    x = np.concatenate([np.linspace(-15, 15, 9997), [0, 1e-6, -1e-6, 300, -300, 1e4, -1e4]]).astype(np.float32)
    y = x.copy()
    activations.activate(y, kind)
    expected = reference.ACTIVATIONS[name](x.astype(np.float64)) if name != "none" else x
    check("activation", y, expected, np.maximum(np.abs(x), 1))
    for start, stop in ((0, 1), (5, 22), (9990, 10004), (1, 10003)):  # other places in a vector, another remainder
        part = x[start:stop].copy()
        activations.activate(part, kind)
        same_bits(part, y[start:stop])
    broken = np.full(37, np.nan, np.float32)
    activations.activate(broken, kind)
    assert np.isnan(broken).all()


# Layer norm and embedding.


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
    x, weight, bias = random_values(*shape), random_values(shape[1], seed=1), random_values(shape[1], seed=2)
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
    x, weight, bias = random_values(13, 97), random_values(97, seed=1), random_values(97, seed=2)
    alone = [run_layer_norm(x, [row], weight, bias) for row in range(rows)]
    same_bits(run_layer_norm(x, range(rows), weight, bias), np.concatenate(alone))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_layer_norm_into_an_operand(dtype):
    x, weight, bias = random_values(13, 97), random_values(97, seed=1), random_values(97, seed=2)
    rows = np.array([3, 0, 12, 12], np.int32)
    operand = new_operand(dtype, len(rows), 97)
    normalize(operand, x, rows, weight, bias)
    for array, expected in zip(operand, operand_of(run_layer_norm(x, rows, weight, bias), dtype), strict=True):
        np.testing.assert_array_equal(array.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("n", "width"), SHAPES)
def test_embed(n, width, dtype):
    vocab, length = 2 * OUT_TILE + 3, 11
    random = np.random.default_rng(0)
    token_ids = np.concatenate([[vocab - 1], random.integers(vocab, size=n - 1)]).astype(np.int32)
    positions = random.integers(length, size=n).astype(np.int32)
    wte, wpe, x = packed(random_values(vocab, width), dtype), random_values(length, width, seed=1), unwritten(n, width)
    factors = np.exp2(random.integers(-2, 3, width)).astype(np.float32)  # powers of 2 change no rounding
    embeds = random_values(n, width, seed=2)
    token_ids[1::3] = -1  # embeds stand for these
    embed_tokens(solo_team(), x, token_ids, embeds, positions, wte, factors, wpe)
    rows = unpacked(wte, dtype)[token_ids, :width].astype(np.float32)
    same_bits(x, np.where(token_ids[:, None] < 0, embeds, rows * factors) + wpe[positions])
