"""Keys and values copied, read and written between rows, in both backends and both precisions."""

import numpy as np
import pytest

from support.kernel_tools import check, from_bits
from tinygpt.kernels import cpu, reference
from tinygpt.kernels.cpu.layers.cache_dtypes import KEY_BLOCK
from tinygpt.kernels.cpu.layers.operands import to_bfloat16
from tinygpt.kernels.numbers import from_rows, to_rows
from tinygpt.weights.config import ModelConfig

BACKENDS = pytest.mark.parametrize(
    ("backend", "dtype"),
    [(cpu, "float32"), (cpu, "bfloat16"), (cpu, "int8"), (reference, "float32"), (reference, "int8")],
    ids=["cpu", "cpu-bf16", "cpu-int8", "reference", "reference-int8"],
)
LENGTH = 3 * KEY_BLOCK
CONFIG = ModelConfig(n_layer=2, n_head=3, n_embd=45, n_positions=LENGTH, vocab_size=50)
RANGES = [
    (0, 1),
    (0, KEY_BLOCK),
    (5, 9),
    (KEY_BLOCK - 1, KEY_BLOCK + 1),
    (3, 2 * KEY_BLOCK + 7),
    (0, LENGTH),
    (9, 9),
]


def filled_cache(backend, dtype):
    """Three rows of random values that the dtype can hold, written a range at a time."""
    random = np.random.default_rng(0)
    cache = backend.new_kv_cache(CONFIG, 3, LENGTH, dtype)
    shape = (3, CONFIG.n_layer, CONFIG.n_head, LENGTH, CONFIG.head_size)
    # 8 bits, which bfloat16 holds, and of each head and position 127: what int8 rounds is whole. Each has a scale.
    k, v = (random.integers(-127, 128, shape).astype(np.float32) for _ in "kv")
    k[..., 4], v[..., 7] = 127, -127
    k, v = (x * 2.0 ** random.integers(-5, 5, (*shape[:-1], 1)).astype(np.float32) for x in (k, v))
    for row in range(3):
        for start, stop in [(0, 7), (7, KEY_BLOCK + 3), (KEY_BLOCK + 3, LENGTH)]:
            backend.write_positions(cache, row, start, k[row, :, :, start:stop], v[row, :, :, start:stop])
    return cache, k, v


def values_of(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.int8:
        return from_rows(array)
    return from_bits(array) if array.dtype == np.uint16 else array


@BACKENDS
@pytest.mark.parametrize(("start", "stop"), RANGES)
def test_read_gives_what_was_written(backend, dtype, start, stop):
    cache, k, v = filled_cache(backend, dtype)
    for row in range(3):
        read = backend.read_positions(cache, row, start, stop, CONFIG.head_size)
        for given, expected in zip(read, (k, v), strict=True):
            np.testing.assert_array_equal(values_of(given), expected[row, :, :, start:stop])


@BACKENDS
@pytest.mark.parametrize(("start", "stop"), RANGES)
def test_copy_changes_these_positions_and_no_other(backend, dtype, start, stop):
    cache, k, v = filled_cache(backend, dtype)
    backend.copy_positions(cache, 2, 0, start, stop)
    for expected in (k, v):
        expected[0, :, :, start:stop] = expected[2, :, :, start:stop]
    after = slice(stop, stop + 1)  # nobody's afterwards
    for row in range(3):
        read = backend.read_positions(cache, row, 0, LENGTH, CONFIG.head_size)
        for given, expected in zip(map(values_of, read), (k, v), strict=True):
            if row == 0:
                given[:, :, after] = expected[row, :, :, after] = 0
            np.testing.assert_array_equal(given, expected[row])


def test_write_rounds_float32_to_the_cache_as_the_kernel_does():
    random = np.random.default_rng(1)
    cache = cpu.new_kv_cache(CONFIG, 1, LENGTH, "bfloat16")
    shape = (CONFIG.n_layer, CONFIG.n_head, 5, CONFIG.head_size)
    values = random.standard_normal(shape).astype(np.float32)
    cpu.write_positions(cache, 0, 3, values, values)
    k, v = cpu.read_positions(cache, 0, 3, 8, CONFIG.head_size)
    expected = np.array([to_bfloat16(x) for x in values.ravel()], np.uint16).reshape(shape)
    np.testing.assert_array_equal(k, expected)
    np.testing.assert_array_equal(v, expected)


def test_an_int8_cache_is_written_in_rows_as_they_are_read():
    """Scales other than 1, and values of which none is a whole number."""
    random = np.random.default_rng(1)
    cache = cpu.new_kv_cache(CONFIG, 2, LENGTH, "int8")
    shape = (CONFIG.n_layer, CONFIG.n_head, 70, CONFIG.head_size)
    k, v = (random.standard_normal(shape).astype(np.float32) for _ in "kv")
    cpu.write_positions(cache, 1, 3, k, v)
    rows = cpu.read_positions(cache, 1, 3, 73, CONFIG.head_size)
    for given, values in zip(rows, (k, v), strict=True):
        assert given.dtype == np.int8
        assert given.shape == (*shape[:3], CONFIG.head_size + 4)
        np.testing.assert_array_equal(given, to_rows(values))
    cpu.write_positions(cache, 0, 5, *rows)
    for given, again in zip(rows, cpu.read_positions(cache, 0, 5, 75, CONFIG.head_size), strict=True):
        np.testing.assert_array_equal(again, given)


def test_rows_are_the_nearest_levels():
    x = np.random.default_rng(0).standard_normal((50, 3, 7)).astype(np.float32)
    rows = to_rows(x)
    largest = np.abs(x).max(-1, keepdims=True).astype(np.float64)
    check("quantized", rows[..., :-4], x / largest * 127)
    np.testing.assert_allclose(from_rows(rows), x, atol=largest.max() / 253)
    assert rows.shape == (50, 3, 11)


def test_what_an_int8_cache_takes():
    """Of a position 64 + 4 bytes for a key and as many for a value, where heads have whole steps and lanes."""
    config = ModelConfig(n_layer=2, n_head=3, n_embd=192, n_positions=LENGTH, vocab_size=50)
    assert cpu.kv_cache_bytes(config, 5, LENGTH, "int8") == 2 * 5 * 3 * LENGTH * 2 * 68
    assert (
        sum(array.nbytes for array in cpu.new_kv_cache(config, 5, LENGTH, "int8"))
        == 2 * 5 * 3 * LENGTH * 2 * 68
    )
