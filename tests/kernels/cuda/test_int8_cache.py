"""An int8 KV cache on a GPU: rows as numbers.py has them, and int8 as numbers of 16 bits."""

import functools

import numpy as np
import pytest
from numba import cuda, int32

from support.cuda_device import SimulatedDevice
from support.kernel_tools import same_bits, unwritten
from support.ptx_machine import simulate
from tinygpt.kernels.cuda.jit import kernel
from tinygpt.kernels.cuda.kv_cache import LAYOUTS, PUT_THREADS, KVCache, put_kernel, read_positions
from tinygpt.kernels.cuda.layers.epilogue import Heads
from tinygpt.kernels.cuda.params import NUMBERS
from tinygpt.kernels.numbers import LEAST_ROW, to_rows

pytestmark = pytest.mark.usefixtures("compute_capability")

HALVES = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
HEADS = 3
SIZE = 37
PADDED = 64
SLOTS = 3
LENGTH = 128
POSITIONS = [*range(60, 80), 0, 127]
SLOT = 1


@HALVES
def test_rows_are_quantized_as_on_the_cpu(dtype):
    """Of two layers the second, with rows that are zeros, tiny, large, infinite and NaN; all others keep their bits."""
    numbers = NUMBERS[dtype]
    count = len(POSITIONS)
    rows = np.random.default_rng(0).standard_normal((count, 3, HEADS, SIZE)).astype(np.float32)
    rows[:6, 1:] *= np.float32([0, LEAST_ROW / 8, 0, 1e4, np.inf, np.nan]).reshape(6, 1, 1, 1)
    rows[2, 1:, :, 5:] = LEAST_ROW
    rows[7, 1:, 1, 5] = np.nan
    stored = numbers.encode(rows.reshape(count, -1))
    rows = numbers.decode(stored).reshape(rows.shape)
    q = np.zeros((count + 1) * HEADS * PADDED, numbers.array_type)
    k, v = (unwritten(2 * SLOTS * HEADS * LENGTH * (PADDED + 4), dtype=np.int8) for _ in "kv")
    width = stored.shape[1] + 5
    given = np.pad(stored, [(0, 1), (0, 5)]).ravel()
    slots = np.full(count + 1, SLOT, np.int32)
    positions = np.array([*POSITIONS, 5], np.int32)
    sizes = np.array([count], np.int32)
    shape = SLOTS, HEADS, LENGTH, PADDED, SIZE
    heads = Heads(q, k, v, positions, slots, SLOTS, LENGTH, HEADS, SIZE, PADDED)
    simulate(put_kernel(dtype), (count + 1, HEADS), PUT_THREADS, heads, given, width, 1, sizes)
    found = numbers.decode(q).reshape(count + 1, HEADS, PADDED)
    same_bits(found[:-1, :, :SIZE], rows[:, 0])
    assert not found[-1].any()
    assert not found[..., SIZE:].any()
    cache = KVCache(SimulatedDevice(), LAYOUTS["int8"], k, v, 2, *shape)
    for part, of_part in enumerate(read_positions(cache, SLOT, 0, LENGTH, SIZE), 1):
        np.testing.assert_array_equal(of_part[1][:, POSITIONS], to_rows(rows[:, part]).swapaxes(0, 1))
        changed = (of_part != -1).any(-1)
        assert set(np.flatnonzero(changed[1].any(0))) == set(POSITIONS)
        assert not changed[0].any()
    assert (np.concatenate([k, v]) != -1).sum() <= 2 * count * HEADS * (SIZE + 4)


@functools.cache
def expanding(dtype: str):
    expand = NUMBERS[dtype].expand

    def fill(out, words):
        i = int32(cuda.threadIdx.x)
        out[2 * i], out[2 * i + 1] = expand(words[i])

    return kernel(fill)


@HALVES
def test_every_int8_is_exact(dtype):
    values = np.arange(-128, 128, dtype=np.int8).reshape(64, 4)
    out = np.zeros(128, np.uint32)
    simulate(expanding(dtype), 1, 64, out, values.view(np.uint32).ravel())
    pairs = NUMBERS[dtype].decode(out.view(NUMBERS[dtype].array_type)).reshape(64, 2, 2)
    same_bits(pairs, np.float32(values[:, [[0, 2], [1, 3]]]))
