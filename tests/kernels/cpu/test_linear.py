"""The matrix product in every precision: packing, operands, and the product itself.

Quantizing is held to the last bit in test_dtype_kernels.py; here the product to what its inputs stand for.
"""

import itertools
from typing import NamedTuple

import numpy as np
import pytest

from support.kernel_tools import (
    ACTIVATIONS,
    SHAPES,
    aligned,
    bfloat16_bits,
    check,
    from_bits,
    operand_of,
    packed,
    random_values,
    same_bits,
    solo_team,
    unpacked,
    unwritten,
    values_of,
)
from tinygpt.kernels.cpu.arrays import NO_FACTORS
from tinygpt.kernels.cpu.dtypes import DTYPES, pack, panel_count
from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.layers import activations
from tinygpt.kernels.cpu.layers.linear import ADD, REPLACE, Linear, linear, linear_to_operand, quarters, whole
from tinygpt.kernels.cpu.layers.operands import quantize_activations
from tinygpt.kernels.cpu.simd.tiles import OUT_TILE
from tinygpt.kernels.cpu.simd.vector_ir import SCALE_GROUP
from tinygpt.kernels.cpu.workspace import new_operand

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
ONLY = np.int64(0)  # the one layer of these weights


@EVERY_DTYPE
@pytest.mark.parametrize("shape", [*SHAPES, (2 * OUT_TILE + 3, SCALE_GROUP + 1)])
def test_pack(shape, dtype):
    weight, (n, k) = random_values(*shape), shape
    record = packed(weight, dtype)
    for array, from_transposed in zip(
        record, packed(np.ascontiguousarray(weight.T), dtype, True), strict=True
    ):
        np.testing.assert_array_equal(array.view(np.uint8), from_transposed.view(np.uint8))
    values = unpacked(record, dtype)
    assert np.isfinite(values).all()
    assert not values[n:].any()
    if dtype == "float32":
        np.testing.assert_array_equal(values[:n, :k], weight)
    elif dtype == "float16":
        np.testing.assert_array_equal(values[:n, :k], weight.astype(np.float16))
    elif dtype == "bfloat16":
        np.testing.assert_array_equal(values[:n, :k], from_bits(bfloat16_bits(weight)))


@EVERY_DTYPE
def test_pack_multiplies_by_the_factors(dtype):
    weight = random_values(7, 70)
    factors = np.exp2(np.random.default_rng(0).integers(-3, 4, 70)).astype(np.float32)
    for array, expected in zip(
        packed(weight, dtype, factors=factors), packed(weight * factors, dtype), strict=True
    ):
        np.testing.assert_array_equal(array, expected)


def test_pack_writes_the_panels_it_is_asked_for():
    weight = random_values(3 * OUT_TILE + 5, 7)
    panels = unwritten(4, 7, OUT_TILE)
    pack("float32", weight, False, np.ones(7, np.float32), [panels], 1, 3)
    same_bits(panels[1:3], packed(weight).panels[0, 1:3])
    assert np.isnan(panels[[0, 3]]).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_operand(shape, dtype):
    x, (_, k) = random_values(*shape), shape
    values = values_of(operand_of(x, dtype), dtype)
    assert not values[:, k:].any()
    check("bfloat16" if dtype == "bfloat16" else "exp", values[:, :k], x, np.abs(x))


@jit
def run_linear_to_operand(team, out, x, linears, layer, segments, activation, rows):
    linear_to_operand(team, out, x, linears, layer, segments, activation, rows)


@jit
def run_convert(team, operand, x, factors, layer):
    quantize_activations(team, operand, x, factors, layer)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])  # an operand of float32 is the array itself
@pytest.mark.parametrize("shape", [(11, 70), (11, 3)])
def test_convert_puts_every_row(shape, dtype):
    x = random_values(*shape)
    operand = new_operand(dtype, *x.shape)
    run_convert(solo_team(), operand, x, NO_FACTORS, ONLY)
    assert_same_operand(operand, operand_of(x, dtype))


def test_convert_is_no_phase_for_float32():
    """Its operand is made of the rows themselves."""
    x, team = random_values(11, 70), solo_team()
    operand, own = operand_of(x), team.own.copy()
    run_convert(team, operand, 2 * x, NO_FACTORS, ONLY)
    same_bits(operand.values, x)
    np.testing.assert_array_equal(team.own, own)


def test_convert_multiplies_by_the_factors_of_its_layer():
    x = random_values(11, 70)
    factors = random_values(2, 2 * OUT_TILE, seed=5)  # as they lie, in whole panels
    operand = new_operand("int8", *x.shape)
    run_convert(solo_team(), operand, x, factors, np.int64(1))
    assert_same_operand(operand, operand_of(x * factors[1, :70], "int8"))


def assert_same_operand(operand, expected) -> None:
    for array, put in zip(operand, expected, strict=True):
        np.testing.assert_array_equal(array.view(np.uint8), put.view(np.uint8))


class Layer(NamedTuple):
    x: np.ndarray  # (M, K)
    weight: np.ndarray  # (N, K)
    bias: np.ndarray  # (N,)
    before: np.ndarray  # (M, N)  what `add` adds to


def random_layer(m: int, k: int, n: int, has_bias: bool = True) -> Layer:
    bias = random_values(n, seed=3) if has_bias else np.empty(0, np.float32)
    return Layer(random_values(m, k, seed=1), random_values(n, k, seed=2), bias, random_values(m, n, seed=4))


def run_linear(
    layer: Layer, dtype="float32", kind=activations.NONE, add=REPLACE, segments=None
) -> np.ndarray:
    out = layer.before.copy() if add else unwritten(*layer.before.shape)
    segments = whole(layer.x.shape[1]) if segments is None else segments
    linears = Linear(packed(layer.weight, dtype), layer.bias[None], NO_FACTORS)
    linear(solo_team(), out, operand_of(layer.x, dtype), linears, ONLY, segments, kind, add)
    return out


def product_name(dtype: str) -> str:
    return "int4 product" if dtype == "int4" else "product"


@EVERY_DTYPE
@pytest.mark.parametrize(("m", "k"), [*SHAPES, (5, 4 * SCALE_GROUP), (9, 5 * SCALE_GROUP)])
def test_linear(m, k, dtype):
    for n in (1, 5, OUT_TILE, 2 * OUT_TILE + 35):
        for has_bias in (True, False):
            check_linear(m, k, n, has_bias, dtype)


def check_linear(m: int, k: int, n: int, has_bias: bool, dtype: str) -> None:
    layer = random_layer(m, k, n, has_bias)
    unit = DTYPES[dtype].k_unit
    x = values_of(operand_of(layer.x, dtype), dtype)
    weight = unpacked(packed(layer.weight, dtype), dtype)[:n]
    bias = layer.bias if has_bias else np.zeros(n)
    expected = x @ weight.T + bias
    scale = np.abs(x) @ np.abs(weight).T + np.abs(bias)
    for segments in [whole(k), *([quarters(k // unit, unit)] if k % unit == 0 else [])]:
        check(product_name(dtype), run_linear(layer, dtype, segments=segments), expected, scale)
        added = run_linear(layer, dtype, add=ADD, segments=segments)
        check(product_name(dtype), added, layer.before + expected, scale + np.abs(layer.before))


def test_linear_takes_the_layer_it_is_told():
    first = random_layer(3, 7, 5)
    layers = [first, first._replace(weight=random_values(5, 7, seed=9), bias=random_values(5, seed=8))]
    weight = type(packed(layers[0].weight))(
        aligned(np.concatenate([packed(layer.weight).panels for layer in layers]))
    )
    linears = Linear(weight, np.stack([layer.bias for layer in layers]), NO_FACTORS)
    for i, layer in enumerate(layers):
        out = unwritten(3, 5)
        x = operand_of(layer.x)
        linear(solo_team(), out, x, linears, np.int64(i), whole(7), activations.NONE, REPLACE)
        same_bits(out, run_linear(layer))


@ACTIVATIONS
@pytest.mark.parametrize("add", [REPLACE, ADD], ids=["replace", "add"])
def test_linear_then_activation(name, kind, add):
    """To the bit: `activate` over the product itself, then the sum."""
    layer = random_layer(11, 35, OUT_TILE + 3)
    y = run_linear(layer)
    activations.activate(y.reshape(-1), kind)
    same_bits(run_linear(layer, kind=kind, add=add), layer.before + y if add else y)


@pytest.mark.parametrize(
    ("dtype", "is_multiplied"),
    [("float32", False), ("bfloat16", False), ("int8", False), ("int8", True)]
    + [pytest.param("int4", is_multiplied, marks=pytest.mark.slow) for is_multiplied in (False, True)],
)
@pytest.mark.parametrize("n", [5, OUT_TILE, OUT_TILE + 35])
def test_linear_to_operand_is_the_operand_of_linear(n, dtype, is_multiplied):
    """Of the second of two layers, with factors of its own; a row more than there are is one of zeros."""
    layer = random_layer(11, 35, n)
    kind = activations.GELU_TANH
    weight = packed(layer.weight, dtype)
    factors = random_values(2, panel_count(n) * OUT_TILE, seed=5) if is_multiplied else NO_FACTORS
    both = type(weight)(*(aligned(np.repeat(array, 2, axis=0)) for array in weight))
    linears = Linear(both, layer.bias[None].repeat(2, 0), factors)
    out = new_operand(dtype, 12, n)
    x = operand_of(layer.x, dtype)
    run_linear_to_operand(solo_team(), out, x, linears, np.int64(1), whole(35), kind, 11)
    expected = run_linear(layer, dtype, kind) * (factors[1, :n] if is_multiplied else np.float32(1))
    assert_same_operand(out, operand_of(np.vstack([expected, np.zeros((1, n), np.float32)]), dtype))


@EVERY_DTYPE
@pytest.mark.parametrize("units", [4, 5, 7])
def test_four_segments_are_added_in_pairs(units, dtype):
    unit = DTYPES[dtype].k_unit
    layer = random_layer(9, units * unit, OUT_TILE + 5)
    bounds = quarters(units, unit)
    sums = []
    for start, stop in itertools.pairwise(bounds):
        part = [np.ascontiguousarray(matrix[:, start:stop]) for matrix in layer[:2]]
        sums.append(segment_of(Layer(*part, layer.bias[:0], layer.before), layer.weight, dtype))
    expected = (sums[0] + sums[1]) + (sums[2] + sums[3]) + layer.bias
    same_bits(run_linear(layer, dtype, segments=bounds), expected)


def segment_of(part: Layer, weight: np.ndarray, dtype: str) -> np.ndarray:
    """The product over a part of K; int8's scales are those of the whole rows of the weight."""
    if dtype != "int8":
        return run_linear(part, dtype)
    largest = np.abs(weight).max(axis=1)  # in a group of its own, where x is 0
    marked = np.pad(part.weight, ((0, 0), (0, SCALE_GROUP)))
    marked[:, -1] = largest
    return run_linear(part._replace(x=np.pad(part.x, ((0, 0), (0, SCALE_GROUP))), weight=marked), dtype)


@pytest.mark.parametrize(("m", "k"), [*SHAPES, (97, 5 * SCALE_GROUP + 3)])
def test_float16_is_float32_of_the_rounded_weights(m, k):
    """To the bit: half the bytes are read, and the chain is the same."""
    layer = random_layer(m, k, OUT_TILE + 35)
    rounded = layer._replace(weight=layer.weight.astype(np.float16).astype(np.float32))
    same_bits(run_linear(layer, "float16"), run_linear(rounded))


@EVERY_DTYPE
@pytest.mark.parametrize("rows", [*range(1, 14), 47, 48, 49, 97])
def test_a_row_has_the_same_bits_among_any_number(rows, dtype):
    layer = random_layer(97, 35, OUT_TILE + 5)
    pairs = zip(layer.x, layer.before, strict=True)
    alone = [run_linear(layer._replace(x=x[None], before=before[None]), dtype) for x, before in pairs]
    for first in {0, 97 - rows}:
        some = slice(first, first + rows)
        part = layer._replace(x=layer.x[some], before=layer.before[some])
        same_bits(run_linear(part, dtype), np.concatenate(alone[some]))


@EVERY_DTYPE
def test_a_row_that_is_not_finite_stays_alone_and_stays_not_finite(dtype):
    layer = random_layer(13, 35, OUT_TILE + 5)
    clean = run_linear(layer, dtype)
    layer.x[4, 1] = np.nan
    layer.x[7, 3] = np.inf
    y = run_linear(layer, dtype)
    assert not np.isfinite(y[[4, 7]]).any()
    others = np.delete(np.arange(13), [4, 7])
    same_bits(y[others], clean[others])


def test_quarters():
    assert (quarters(25, 64) // 64).tolist() == [0, 7, 13, 19, 25]
    assert quarters(12, 64).tolist() == [0, 192, 384, 576, 768]
    for units in range(1, 40):
        bounds = quarters(units, 3)
        assert (bounds[0], bounds[-1]) == (0, 3 * units)
        assert bounds.dtype == np.int64
        assert len(bounds) == (5 if units >= 4 else 2)
        shares = np.diff(bounds) // 3
        assert (np.diff(bounds) % 3 == 0).all()
        assert 0 <= shares[0] - shares[-1] <= 1
        assert (np.diff(shares) <= 0).all()


def test_panel_count():
    assert [panel_count(n) for n in (1, OUT_TILE, OUT_TILE + 1, 2 * OUT_TILE)] == [1, 1, 2, 2]
