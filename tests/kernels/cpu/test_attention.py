"""Attention over the cache, each kernel alone, against the reference's, around the borders of blocks and tiles."""

from typing import NamedTuple

import numpy as np
import pytest

from support.kernel_tools import (
    as_float32,
    bfloat16_bits,
    check,
    from_bits,
    random_values,
    same_bits,
    same_bytes,
    solo_team,
    unwritten,
)
from tinygpt.kernels import numbers
from tinygpt.kernels.backend import query_tiles
from tinygpt.kernels.cpu.arrays import ALL_POSITIONS
from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.kv_cache import KINDS
from tinygpt.kernels.cpu.layers.attention import LayerDistances, attend, write_kv, write_token
from tinygpt.kernels.cpu.layers.cache_dtypes import KEY_BLOCK, padded_head
from tinygpt.kernels.cpu.simd.tiles import ROW_TILE
from tinygpt.kernels.reference import layers as reference
from tinygpt.weights.config import Attention

CACHES = pytest.mark.parametrize("dtype", KINDS)
TOLERANCE = {"float32": "attention", "bfloat16": "bfloat16 attention", "int8": "int8 attention"}


class Cache(NamedTuple):
    """One layer's: k (S, H, T / KEY_BLOCK, D / P, KEY_BLOCK, P), v (S, H, T / KEY_BLOCK, KEY_BLOCK / P, padded D, P).

    bfloat16 is uint16. int8 is uint8, 128 larger, and k has two steps more: the scales of keys and of values, float32.
    """

    k: np.ndarray
    v: np.ndarray


def new_kv_cache(sequences: int, heads: int, size: int, length: int, dtype: str) -> Cache:
    blocks = -(-length // KEY_BLOCK)
    (kind, p) = KINDS[dtype]
    steps = -(-size // p) + 2 * (dtype == "int8")
    k = unwritten(sequences, heads, blocks, steps, KEY_BLOCK, p, dtype=kind)
    return Cache(k, unwritten(sequences, heads, blocks, KEY_BLOCK // p, padded_head(size), p, dtype=kind))


@jit
def write(k, v, qkv, positions, token_slots):
    for n in range(len(positions)):
        for head in range(k.shape[1]):
            write_token(n, head, k, v, qkv, positions[n], token_slots[n])


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """What a cache of this dtype keeps of them, (..., D)."""
    if dtype == "int8":
        return numbers.from_rows(numbers.to_rows(values))
    return values if dtype == "float32" else from_bits(bfloat16_bits(values))


def plain(cache: Cache, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values, (S, H, T, D) float32."""
    k, v = in_positions(cache)
    if cache.k.dtype == np.uint8:
        parts = zip((k, v), np.split(k[..., -8:], 2, axis=-1), strict=True)
        return tuple((x[..., :size] - np.float32(128)) * s.copy().view(np.float32) for x, s in parts)
    return tuple(as_float32(x[..., :size]) for x in (k, v))


def in_positions(cache: Cache) -> tuple[np.ndarray, np.ndarray]:
    """What lies in the cache for each position, (S, H, T, ...)."""
    k = cache.k.transpose(0, 1, 2, 4, 3, 5)  # (S, H, T / KEY_BLOCK, KEY_BLOCK, D / P, P)
    v = cache.v.swapaxes(-1, -2)  # (S, H, T / KEY_BLOCK, KEY_BLOCK / P, P, padded D)
    sequences, heads, blocks = k.shape[:3]
    return tuple(x.reshape(sequences, heads, blocks * KEY_BLOCK, -1) for x in (k, v))


class Run(NamedTuple):
    """Some sequences of given lengths; the first `cached` positions of each are already in the cache."""

    qkv: np.ndarray  # (N, 3C), all positions of all sequences, end to end
    lengths: list[int]
    cached: list[int]
    heads: int

    @property
    def size(self) -> int:
        return self.qkv.shape[1] // (3 * self.heads)


def run_attend(
    run: Run,
    dtype: str = "float32",
    tiles_of=lambda starts: query_tiles(starts, ROW_TILE),
    slopes: tuple[float, ...] = (),
    window=None,
) -> np.ndarray:
    """The new tokens' attention, (new tokens, C), of which those of several tiles are written before."""
    bounds = np.concatenate([[0], np.cumsum(run.lengths)])
    rows = np.arange(len(run.lengths))[::-1] + 1  # no sequence lies in the row of its number
    token_slots = np.repeat(rows, run.lengths).astype(np.int32)
    positions = np.concatenate([np.arange(length) for length in run.lengths]).astype(np.int32)
    is_new = positions >= np.repeat(run.cached, run.lengths)
    cache = new_kv_cache(len(rows) + 1, run.heads, run.size, max(run.lengths), dtype)
    write(*cache, run.qkv[~is_new], positions[~is_new], token_slots[~is_new])
    starts = np.concatenate([[0], np.cumsum(np.diff(bounds) - run.cached)]).astype(np.int32)
    qkv = run.qkv[is_new]
    out = unwritten(is_new.sum(), run.heads * run.size)
    where = positions[is_new], token_slots[is_new], tiles_of(starts).astype(np.int32)
    write_kv(solo_team(), *cache, qkv, *where)
    distances = None
    if slopes or window:
        steep = np.array(slopes or [0] * run.heads, np.float32)
        distances = LayerDistances(steep, window or ALL_POSITIONS)
    attend(solo_team(run.size), out, qkv, *cache, *where, np.float32(run.size**-0.5), distances)
    return out


def exact_attention(
    run: Run, dtype: str = "float32", slopes: tuple[float, ...] = (), window=None
) -> np.ndarray:
    outs, start = [], 0
    for length, cached in zip(run.lengths, run.cached, strict=True):
        qkv = run.qkv[start : start + length].astype(np.float64).reshape(length, 3, run.heads, run.size)
        q, k, v = qkv.transpose(1, 0, 2, 3)  # (T, H, D)
        q = q.astype(np.float32) * np.float32(run.size**-0.5)
        q, k, v = (rounded(x.astype(np.float32), dtype).astype(np.float64) for x in (q, k, v))
        attend_exactly = reference.attend_int8 if dtype == "int8" else reference.attend
        k = k.swapaxes(0, 1)
        v = v.swapaxes(0, 1)
        at = np.arange(cached, length)
        out = attend_exactly(q[cached:], k, v, at, Attention(1.0, slopes, window))  # (N, H, D)
        outs.append(out.reshape(len(out), -1))
        start += length
    return np.concatenate(outs)


def random_run(lengths, cached, heads: int, size: int, spread: float = 1.0) -> Run:
    qkv = np.random.default_rng(size).standard_normal((sum(lengths), 3 * heads * size), np.float32)
    qkv[:, : 2 * heads * size] *= spread
    qkv[:, 2 * heads * size + size // 3] *= 20  # a value channel that stands out
    return Run(qkv, list(lengths), list(cached), heads)


@CACHES
@pytest.mark.parametrize("size", [1, 5, 16, 20])
def test_a_token_writes_its_places_and_nothing_else(size, dtype):
    heads, random = 3, np.random.default_rng(size)
    cache = new_kv_cache(4, heads, size, 130, dtype)
    qkv = random_values(40, 3 * heads * size)
    flat = np.sort(random.choice(4 * 130, size=40, replace=False))
    token_slots, positions = flat // 130, flat % 130
    write(*cache, qkv, positions, token_slots)
    _, keys, values = rounded(qkv.reshape(40, 3, heads, size), dtype).transpose(1, 0, 2, 3)  # (N, H, D)
    k, v = plain(cache, size)
    same_bits(k[token_slots, :, positions], keys)
    same_bits(v[token_slots, :, positions], values)
    cleared = set() if dtype != "bfloat16" else {at + 1 for at in flat if at % 130 % 2 == 0} - set(flat)
    assert (~np.isnan(k)).sum() == values.size
    assert (~np.isnan(v)).sum() == values.size + len(cleared) * heads * size
    assert all((v[at // 130, :, at % 130] == 0).all() for at in cleared)
    if dtype == "int8":
        is_written = np.zeros((4, heads, 3 * KEY_BLOCK), bool)
        is_written[token_slots, :, positions] = True
        assert all((array[~is_written] == 0xFF).all() for array in in_positions(cache))


@CACHES
def test_each_key_is_written_once(dtype):
    """By write_kv where several tiles of its sequence read it, else by the tile that alone does."""
    heads = 3
    size = 16
    lengths = (1, 13, 6, 2)
    slots = np.repeat([3, 1, 0, 2], lengths).astype(np.int32)
    positions = np.concatenate([np.arange(4, 4 + length) for length in lengths]).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    where = positions, slots, query_tiles(starts, ROW_TILE).astype(np.int32)
    qkv = random_values(len(slots), 3 * heads * size)
    cache = new_kv_cache(4, heads, size, 20, dtype)
    write(*cache, random_values(16, 3 * heads * size), np.tile(np.arange(4), 4), np.repeat(np.arange(4), 4))
    before, k, v = new_kv_cache(4, heads, size, 20, dtype), *cache
    before.k[:], before.v[:] = k, v
    write_kv(solo_team(), k, v, qkv, *where)
    of_several = slots == 1
    write(*before, qkv[of_several], positions[of_several], slots[of_several])
    same_bytes(cache, before)
    out = unwritten(len(slots), heads * size)
    attend(solo_team(size), out, qkv, k, v, *where, np.float32(size**-0.5), None)
    write(*before, qkv[~of_several], positions[~of_several], slots[~of_several])
    same_bytes(cache, before)


@pytest.mark.parametrize("value", [0, 2.0**-113, 2.0**-111, 1e38, np.inf, -np.inf, np.nan])
def test_an_int8_cache_of_one_extreme(value):
    """What is too small for an inverse is 0, and what is not finite makes its own key and value NaN alone."""
    heads = 2
    size = 5
    x = random_values(3, 30)
    x[1, 10:12] = x[1, 20:22] = value
    x[1, 12:15] = x[1, 22:25] = 0
    cache = new_kv_cache(1, heads, size, 3, "int8")
    write(*cache, x, np.arange(3), np.zeros(3, np.int64))
    expected = rounded(x.reshape(3, 3, heads, size)[:, 1:], "int8").transpose(1, 2, 0, 3)  # (2, H, T, D)
    for found, wanted in zip(plain(cache, size), expected, strict=True):
        np.testing.assert_array_equal(found[0, :, :3], wanted)
    assert np.isnan(expected).sum() == (0 if np.isfinite(value) else 2 * size)
    assert (expected[:, 0, 1] == 0).all() == (abs(value) < 2.0**-112)


@CACHES
@pytest.mark.parametrize("size", [1, 5, 16, 20, 64, 80, 128])
@pytest.mark.parametrize("length", [1, 6, 20, 40, 63, 64, 65, 128, 129])
def test_attend(length, size, dtype):
    """A whole prompt, the last tokens of one, and a decode step, beside each other."""
    run = random_run([length, length, length, 7], [0, max(length - 7, 0), length - 1, 3], 2, size, spread=1.3)
    found = run_attend(run, dtype)
    expected = exact_attention(run, dtype)
    check(TOLERANCE[dtype], found, expected, np.abs(run.qkv[:, -2 * size :]).max())


@CACHES
@pytest.mark.slow  # compiled for it alone
@pytest.mark.parametrize("length", [1, 6, 64, 65, 129])
def test_alibi(length, dtype):
    """A steep slope and a flat one; the bits of a query do not depend on its tile here either."""
    run = random_run([length, 7], [max(length - 7, 0), 3], 2, 20, spread=1.3)
    slopes = (0.5, 2.0**-8)
    out = run_attend(run, dtype, slopes=slopes)
    expected = exact_attention(run, dtype, slopes)
    check(TOLERANCE[dtype], out, expected, np.abs(run.qkv[:, -40:]).max())
    assert length == 1 or not np.allclose(out, exact_attention(run, dtype), atol=0.01)
    same_bits(run_attend(run, dtype, lambda starts: np.arange(starts[-1] + 1), slopes), out)


@CACHES
@pytest.mark.slow  # compiled for it alone
@pytest.mark.parametrize("window", [1, 5, 63, 64, 65, 100, 129, 200])
def test_a_window(window, dtype):
    """A prompt over three blocks: the bits of a query depend neither on its tile nor on what is cached."""
    run = random_run([131], [0], 2, 20, spread=1.3)
    out = run_attend(run, dtype, window=window)
    expected = exact_attention(run, dtype, window=window)
    check(TOLERANCE[dtype], out, expected, np.abs(run.qkv[:, -40:]).max())
    assert window >= 131 or not np.allclose(out, exact_attention(run, dtype), atol=0.01)
    for bounds in (np.arange(132), np.array([0, 1, 3, *range(8, 131, 4), 131])):
        same_bits(run_attend(run, dtype, lambda starts, bounds=bounds: bounds, window=window), out)
    for length, cached in ((64, 63), (65, 63), (70, 60), (129, 127), (131, 130)):
        part = Run(run.qkv[:length], [length], [cached], 2)
        same_bits(run_attend(part, dtype, window=window), out[cached:length])
    if window >= 131:
        same_bits(run_attend(run, dtype), out)


@CACHES
@pytest.mark.parametrize("size", [5, 64])
def test_a_query_has_the_same_bits_in_any_tile(size, dtype):
    whole_prompt = random_run([131], [0], 2, size)
    together = run_attend(whole_prompt, dtype)
    for bounds in (np.arange(132), np.array([0, 1, 3, *range(8, 131, 4), 131])):
        same_bits(run_attend(whole_prompt, dtype, lambda starts, bounds=bounds: bounds), together)
    for length, cached in ((1, 0), (64, 63), (65, 63), (70, 60), (129, 127)):
        part = Run(whole_prompt.qkv[:length], [length], [cached], 2)
        same_bits(run_attend(part, dtype), together[cached:length])


def test_the_reference_rounds_the_weights_of_an_int8_cache_to_14_bits():
    """Queries, keys and values are whole numbers already, so that the weights' roundings are all there is."""
    random = np.random.default_rng(0)
    shape = (2, 150, 7)
    q, k, v = random.integers(-127, 128, (3, *shape)).astype(np.float64)
    for x in (q, k, v):
        x[..., 0] = 127
    k[:, :64, 0] = -127  # the first block's weights are a twentieth of the others'
    q = q[:, :9].swapaxes(0, 1)
    positions = np.arange(141, 150)
    attention = Attention(1e-4)
    weights = reference.attention_weights(q, k, positions, attention)  # (N, H, T)
    levels = [weights[..., start : start + 64].max(-1) / (2**14 - 1) for start in (0, 64, 128)]  # (N, H) each
    squares = [(v[:, start : start + 64] ** 2).sum(1) for start in (0, 64, 128)]  # (H, D) each
    # A rounding to whole numbers has variance 1/12.
    variance = sum(level[..., None] ** 2 * square / 12 for level, square in zip(levels, squares, strict=True))
    given = q, k, v, positions, attention
    error = reference.attend_int8(*given) - reference.attend(*given)  # (N, H, D)
    assert 0.85 < np.sqrt((error**2 / variance).mean()) < 1.15


@pytest.mark.parametrize("size", [5, 64, 80])
def test_int8_attention_is_near_float_attention(size):
    """Against a calculation that rounds nothing, where a fault of the definition itself would show."""
    run = random_run([150, 40], [140, 0], 2, size)
    error = np.abs(run_attend(run, "int8") - exact_attention(run)) / np.abs(run.qkv[:, -2 * size :]).max()
    assert error.max() < 0.03
    assert error.mean() < 0.003


def test_int8_attention_to_a_value_that_is_not_finite():
    """It makes those NaN that see it, and no other."""
    run = random_run([70], [0], 2, 16)
    run.qkv[66, -1] = np.inf
    out = run_attend(run, "int8").reshape(70, 2, 16)
    assert np.isnan(out[66:, 1]).all()
    assert np.isfinite(out[:66]).all()
    assert np.isfinite(out[66:, 0]).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("length", [5, 64, 130])
def test_attend_with_extreme_scores(length, sign):
    """Scores of 1e4 and of -1e4: weights from 0 to 1 and nothing in between overflows."""
    run = random_run([length], [0], 2, 16, spread=1.0)
    run.qkv[:, :32] = 50 * sign
    run.qkv[:, 32:64] = 50 * (1 + 1e-2 * np.arange(length)[:, None] % 0.07)
    out = run_attend(run)
    largest = np.abs(run.qkv[:, 64:]).max()
    assert np.isfinite(out).all()
    check("extreme attention", out, exact_attention(run), largest)


def test_attend_where_later_scores_dwarf_earlier_ones():
    """The running maximum rises by 1e4 at a block's border: what came before has weight 0, not NaN."""
    run = random_run([129], [0], 1, 16)
    run.qkv[:, :16] = 50
    run.qkv[:, 16:32] = -50
    run.qkv[[64, 128], 16:32] = 50
    out, values = run_attend(run), run.qkv[:, 32:]
    same_bits(out[[0, 64]], values[[0, 64]])
    check("attention", out[100], values[64], 20)
    check("attention", out[128], values[[64, 128]].mean(0), 20)


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [6], [7], [13, 1, 12, 5], [1, 100, 1]])
def test_query_tiles(lengths):
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    bounds = query_tiles(starts, ROW_TILE)
    assert (bounds[0], bounds[-1]) == (0, starts[-1])
    assert set(starts) <= set(bounds.tolist())  # no tile holds tokens of two sequences
    assert 1 <= np.diff(bounds).min() <= np.diff(bounds).max() <= ROW_TILE
    assert len(bounds) - 1 == sum(-(-length // ROW_TILE) for length in lengths)
