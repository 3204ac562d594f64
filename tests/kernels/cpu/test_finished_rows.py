"""The last steps of a tile's result, to the bit, against NumPy: NaN, infinities and zeros of both signs among them."""

import numpy as np
import pytest

from support.kernel_tools import random_values, same_bits, unwritten
from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.layers.formats import Int8Operand
from tinygpt.kernels.cpu.layers.operands import put, quantize_rows
from tinygpt.kernels.cpu.simd.panels import add_rows, put_rows, sum_2_segments, sum_4_segments
from tinygpt.kernels.cpu.simd.tiles import OUT_TILE
from tinygpt.kernels.cpu.simd.vector_ir import address, float32_at

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
    y, scales, biases = panel_rows(rows), random_values(OUT_TILE, seed=1), random_values(OUT_TILE, seed=2)
    shape = rows, OUT_TILE + 2 * STRANGERS
    target = random_values(*shape, seed=3) if adds else unwritten(*shape)
    expected, inside = target.copy(), slice(STRANGERS, STRANGERS + OUT_TILE)
    finished = y * scales + biases
    expected[:, inside] = expected[:, inside] + finished if adds else finished
    run_rows(target, y, scales, biases, adds)
    same_numbers(target, expected)


def test_a_row_of_ones_and_one_of_negative_zeros_change_no_bit():
    y, target = panel_rows(3), unwritten(3, OUT_TILE + 2 * STRANGERS)
    run_rows(target, y, np.ones(OUT_TILE, np.float32), np.full(OUT_TILE, -0.0, np.float32), False)
    same_bits(target[:, STRANGERS:-STRANGERS], y)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("count", [2, 4])
def test_segments_are_scaled_and_added_in_pairs(count, rows):
    segments, scales = random_values(count, 6, OUT_TILE), random_values(OUT_TILE, seed=1)
    parts = [segment[:rows] * scales for segment in segments]
    expected = segments.copy()
    expected[0, :rows] = parts[0] + parts[1] if count == 2 else (parts[0] + parts[1]) + (parts[2] + parts[3])
    run_sum(segments, rows, scales)
    same_bits(segments, expected)


@pytest.mark.parametrize("kind", [np.int8, np.int16])
def test_rows_are_quantized_as_one_by_one(kind):
    x, factors, summands = random_values(7, OUT_TILE), random_values(OUT_TILE, seed=1), random_values(OUT_TILE, seed=2)
    x[2], x[3], x[4] = panel_rows(1), 0, -summands / factors * np.float32(1 + 1e-6)
    values, sizes = np.zeros((2, 7, 3 * OUT_TILE), kind), np.zeros((2, 7, 3, 4), np.float32)
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
        np.testing.assert_array_equal(np.signbit(found[~np.isnan(found)]), np.signbit(expected[~np.isnan(expected)]))
