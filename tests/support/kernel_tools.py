"""Arrays as CPU kernels expect them, a team of one, tolerances, compiled kernels by name, and rows of logits.

Outputs and scratch start as NaN: a kernel writes its result in full and reads only what was written.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest
from numba.core import event

from support.tables import rows
from tinygpt.kernels.cpu.compiler import DiskCache
from tinygpt.kernels.cpu.dtypes import new_weight, pack, panel_count
from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.layers import activations
from tinygpt.kernels.cpu.layers.attention import scratch_size
from tinygpt.kernels.cpu.layers.linear import SCRATCH
from tinygpt.kernels.cpu.layers.operands import put
from tinygpt.kernels.cpu.simd.tiles import OUT_TILE
from tinygpt.kernels.cpu.simd.vector_ir import SCALE_GROUP, VECTOR_BYTES, WEIGHT_GROUP
from tinygpt.kernels.cpu.team import Team, begin_step, new_teams
from tinygpt.kernels.cpu.workspace import new_operand
from tinygpt.kernels.numbers import Warpers

EPS = 2.0**-24  # half a unit in the last place of a float32 near 1
KINDS = [("none", activations.NONE), *activations.ACTIVATIONS.items()]
ACTIVATIONS = pytest.mark.parametrize(("name", "kind"), KINDS, ids=[name for name, _ in KINDS])
SHAPES = rows("""
1 | 1
3 | 5
7 | 35
17 | 97
50 | 130
13 | 64
6 | 16
""")


class Tolerance(NamedTuple):
    """An error is measured against what rounding errors are in proportion to, which `check` is given."""

    limit: float
    reason: str


# Limits are so many EPS and something more.
TOLERANCES = {
    name: Tolerance(count * EPS + more, reason)
    for name, count, more, reason in rows("""
exp | 4 | 0 | relative: 2 units in the last place, as its docstring says
tanh | 4 | 0 | relative: exp's error, halved by the division, and three roundings
erf | 0 | 5e-7 | absolute: the formula's own 1.5e-7, and near 0 the roundings of a sum that is near 1
activation | 0 | 5e-7 | against max(|x|, |y|, 1): x times a share in 0..1 that is off by erf's error at most, or exact
product | 24 | 0 | against |x| @ |w|: a chain of 130 roundings, which mostly cancel
int4 product | 64 | 0 | against |x| @ |w|: levels and offsets, each larger than w, cancel
sum | 8 | 0 | against the sum of sizes: a chain of 9 roundings a lane, four folds
layer_norm | 64 | 0 | against the outlier: mean and variance are rounded once more each
attention | 32 | 0 | against the largest value: scores of a few units, rounded, go through exp
bfloat16 attention | 32 | 0.001953125 | against the largest value: weights are rounded to 8 bits, 2**-9
int8 attention | 0 | 0.000244140625 | against the largest value: some weights fall on the next of 2**14 levels, 2**-12
extreme attention | 0 | 0.05 | against the largest value: half a unit of a score of 1e4 is 5e-4, times D
bfloat16 | 0 | 0.00390625 | relative: half a unit of 8 bits, and a little, 2**-8
quantized | 0 | 0.5001 | in steps: the nearest level, found in float32
""")
}


def check(kind: str, actual, expected, scale=1.0) -> None:
    error = np.abs(np.asarray(actual, np.float64) - expected) / scale
    assert error.max() <= TOLERANCES[kind].limit, TOLERANCES[kind].reason


def same_bits(actual, expected) -> None:
    assert actual.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


def same_bytes(found, expected) -> None:
    for each, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(each.view(np.uint8), other.view(np.uint8))


def aligned(array: np.ndarray) -> np.ndarray:
    """The same values at a vector's boundary, where tiles expect their B."""
    raw = np.empty(array.nbytes + VECTOR_BYTES, np.uint8)
    start = -raw.ctypes.data % VECTOR_BYTES
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def unwritten(*shape: int, dtype=np.float32) -> np.ndarray:
    """All bits set: NaN, as float32 and as bfloat16."""
    array = aligned(np.empty(shape, dtype))
    array.view(np.uint8)[...] = 0xFF
    return array


def random_values(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal values with a channel that stands out twentyfold, as in trained models."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    values[..., shape[-1] // 3] *= 20
    return values


def solo_team(head_size: int = 1) -> Team:
    """A team of one, in its first step."""
    (team,) = new_teams(unwritten(1, max(SCRATCH, scratch_size(head_size))))
    begin_step(team)
    return team


# bfloat16, which NumPy does not have.


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 of finite values, ties to even, as uint16."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    low, kept = bits & 0xFFFF, bits >> 16
    up = (low > 0x8000) | ((low == 0x8000) & (kept & 1 == 1))
    return (kept + up).astype(np.uint16)


def from_bits(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def as_float32(array: np.ndarray) -> np.ndarray:
    """bfloat16, kept in 16 bits or in 32."""
    return array if array.dtype == np.float32 else from_bits(array)


# Weights and operands in every precision, and what they stand for.


def packed(weight: np.ndarray, dtype: str = "float32", is_transposed: bool = False, factors=None):
    """The weight (N, K) as its record of one layer; (K, N) where transposed."""
    n, k = weight.shape[::-1] if is_transposed else weight.shape
    record = new_weight(dtype, 1, n, k)
    for array in record:
        array.view(np.uint8)[...] = 0xFF
    factors = np.ones(k, np.float32) if factors is None else factors
    layer = [array[0] for array in record]
    pack(dtype, weight, is_transposed, factors, layer, 0, panel_count(n))
    return record


def unpacked(weight, dtype: str) -> np.ndarray:
    """What a weight's record stands for: (P * OUT_TILE, K rounded up) float64, its padding included."""
    panels = weight.panels[0]
    if dtype == "float32":
        values = panels.astype(np.float64)  # (P, K, OUT_TILE)
    elif dtype == "float16":
        values = panels.view(np.float16).astype(np.float64)
    elif dtype == "bfloat16":
        values = in_order(from_bits(panels).astype(np.float64))
    elif dtype == "int8":
        scales = weight.scales[0].astype(np.float64).reshape(-1, 1, OUT_TILE)
        values = (in_order(panels.astype(np.float64)) - 128) * scales
    else:
        both = np.stack([panels & 15, panels >> 4], axis=2)  # (P, K / 8, 2, OUT_TILE, 4)
        levels = in_order(both.reshape(len(panels), -1, OUT_TILE, 4).astype(np.float64))
        groups = from_bits(weight.group_scales[0]).astype(np.float64)  # (P, K / WEIGHT_GROUP, 2, OUT_TILE)
        scale, offset = (np.repeat(groups[:, :, i], WEIGHT_GROUP, axis=1) for i in (0, 1))
        values = levels * scale + offset
    return values.transpose(0, 2, 1).reshape(len(panels) * OUT_TILE, -1)


def in_order(panels: np.ndarray) -> np.ndarray:
    """(P, K / U, OUT_TILE, U) -> (P, K, OUT_TILE)."""
    p, steps, columns, unit = panels.shape
    return panels.transpose(0, 1, 3, 2).reshape(p, steps * unit, columns)


@jit
def put_rows(operand, x):
    for n in range(x.shape[0]):
        put(operand, n, 0, x[n])


def operand_of(x: np.ndarray, dtype: str = "float32"):
    """The rows of x (M, K) as what a weight of this dtype is multiplied by."""
    operand = new_operand(dtype, *x.shape)
    put_rows(operand, x)
    return operand


def values_of(operand, dtype: str) -> np.ndarray:
    """What an operand stands for: (M, K rounded up) float64."""
    if dtype in ("float32", "float16"):
        return operand.values.astype(np.float64)
    if dtype == "bfloat16":
        return as_float32(operand.values).astype(np.float64)
    return operand.values * np.repeat(operand.scales[:, :, 0].astype(np.float64), SCALE_GROUP, axis=1)


class Compiled(event.Listener):
    """A listener of Numba. names: the kernels, in the order in which they began to compile."""

    def __init__(self):
        self.names: list[str] = []

    def on_start(self, event) -> None:
        dispatcher = event.data["dispatcher"]
        if isinstance(getattr(dispatcher, "_cache", None), DiskCache):
            self.names.append(dispatcher.py_func.__name__)

    def on_end(self, event) -> None:
        pass


@contextmanager
def compiled_kernels() -> Iterator[Compiled]:
    with event.install_listener("numba:compile", listener := Compiled()):
        yield listener


# Rows of logits (V,) on which a choice of tokens may go wrong: ties, removed tokens, extremes.


def random_row(vocab, seed, spread=3.0):
    return (np.random.default_rng(seed).standard_normal(vocab) * spread).astype(np.float32)


def tied_row(vocab, seed):
    return np.random.default_rng(seed).integers(-3, 4, vocab).astype(np.float32)


def masked_row(vocab, seed):
    row = random_row(vocab, seed)
    row[np.random.default_rng(seed).random(vocab) < 0.7] = -np.inf
    row[seed % vocab] = 1.0
    return row


def one_hot_row(vocab, seed):
    row = np.full(vocab, -np.inf, np.float32)
    row[seed % vocab] = -3.0
    return row


def extreme_row(vocab, seed):
    return np.random.default_rng(seed).choice(np.float32([-1e4, 1e4, 0, -0.0, 9999.5]), vocab)


def uniform_row(vocab, seed):
    return np.full(vocab, seed - 2.5, np.float32)


ROWS = [random_row, tied_row, masked_row, one_hot_row, extreme_row, uniform_row]


def warpers_of(rows, *setting, **others):
    """Warpers with these settings, each one for all rows or an array with one for each row."""
    given = Warpers._field_defaults | dict(zip(Warpers._fields, setting, strict=False)) | others
    return Warpers(*(np.array(np.broadcast_to(given[name], rows), np.float64) for name in Warpers._fields))
