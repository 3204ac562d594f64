"""Keys and values copied, read and written between rows, in both backends and both precisions."""

import numpy as np
import pytest

from tinygpt.config import ModelConfig
from tinygpt.kernels import cpu, reference
from tinygpt.kernels.cpu.layers.attention import KEY_BLOCK
from tinygpt.kernels.cpu.layers.operands import to_bfloat16

BACKENDS = pytest.mark.parametrize(
    ("backend", "dtype"),
    [(cpu, "float32"), (cpu, "bfloat16"), (reference, "float32")],
    ids=["cpu", "cpu-bf16", "reference"],
)
LENGTH = 3 * KEY_BLOCK
CONFIG = ModelConfig(n_layer=2, n_head=3, n_embd=45, n_positions=LENGTH, vocab_size=50)
RANGES = [(0, 1), (0, KEY_BLOCK), (5, 9), (KEY_BLOCK - 1, KEY_BLOCK + 1), (3, 2 * KEY_BLOCK + 7), (0, LENGTH), (9, 9)]


def filled_cache(backend, dtype):
    """Three rows of random values that the dtype can hold, written a range at a time."""
    random = np.random.default_rng(0)
    cache = backend.new_kv_cache(CONFIG, 3, LENGTH, dtype)
    shape = (3, CONFIG.n_layer, CONFIG.n_head, LENGTH, CONFIG.head_size)
    k, v = (random.integers(-200, 200, shape).astype(np.float32) for _ in "kv")  # 8 bits: bfloat16 holds them
    for row in range(3):
        for start, stop in [(0, 7), (7, KEY_BLOCK + 3), (KEY_BLOCK + 3, LENGTH)]:
            backend.write_positions(cache, row, start, k[row, :, :, start:stop], v[row, :, :, start:stop])
    return cache, k, v


def values_of(array: np.ndarray) -> np.ndarray:
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array


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
        for given, expected in zip(
            backend.read_positions(cache, row, 0, LENGTH, CONFIG.head_size), (k, v), strict=True
        ):
            given = values_of(given)
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
