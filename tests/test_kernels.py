"""Each CPU kernel alone, against float64 in NumPy, over shapes that fit no vector, no tile and no block.

Outputs and scratch start as NaN: a kernel writes its result in full and reads nothing that nobody wrote.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest

from tinygpt.kernels.cpu import activations, tiles
from tinygpt.kernels.cpu.attention import KEY_BLOCK, attend, padded_head, scratch_size, write_kv
from tinygpt.kernels.cpu.embedding import embed
from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.layer_norm import layer_norm
from tinygpt.kernels.cpu.linear import ADD, REPLACE, SCRATCH, linear, pack, panel_count, quarters, whole
from tinygpt.kernels.cpu.model import query_tiles
from tinygpt.kernels.cpu.team import Team, begin_step, new_board
from tinygpt.kernels.cpu.tiles import LANES, PANEL, TILE_ROWS, VECTOR_BYTES
from tinygpt.kernels.reference import model as reference

EPS = 2.0**-24  # half a unit in the last place of a float32 near 1


class Tolerance(NamedTuple):
    """An error is measured against what rounding errors are in proportion to, which `check` is given."""

    limit: float
    reason: str


TOLERANCES = {
    "exp": Tolerance(4 * EPS, "relative: 2 units in the last place, as its docstring says"),
    "tanh": Tolerance(4 * EPS, "relative: exp's error, halved by the division, and three roundings"),
    "erf": Tolerance(5e-7, "absolute: the formula's own 1.5e-7, and near 0 the roundings of a sum that is near 1"),
    "activation": Tolerance(5e-7, "against max(|x|, 1): x times a share in 0..1 that is off by erf's error at most"),
    "product": Tolerance(24 * EPS, "against |x| @ |w|: a chain of 130 roundings, which mostly cancel"),
    "sum": Tolerance(8 * EPS, "against the sum of sizes: a chain of 9 roundings a lane, four folds"),
    "layer_norm": Tolerance(64 * EPS, "against the outlier: mean and variance are rounded once more each"),
    "attention": Tolerance(32 * EPS, "against the largest value: scores of a few units, rounded, go through exp"),
    "extreme attention": Tolerance(0.05, "against the largest value: half a unit of a score of 1e4 is 5e-4, times D"),
}
SHAPES = [(1, 1), (3, 5), (7, 35), (17, 97), (50, 130), (13, 64), (6, 16)]
KINDS = [("none", activations.NONE), *activations.ACTIVATIONS.items()]
ACTIVATIONS = pytest.mark.parametrize(("name", "kind"), KINDS, ids=[name for name, _ in KINDS])


def check(kind: str, actual, expected, scale=1.0) -> None:
    error = np.abs(np.asarray(actual, np.float64) - expected) / scale
    assert error.max() <= TOLERANCES[kind].limit, TOLERANCES[kind].reason


def same_bits(actual, expected) -> None:
    assert actual.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


def aligned(array: np.ndarray) -> np.ndarray:
    """The same float32 values at a vector's boundary, where tiles expect their B."""
    raw = np.empty(array.size + LANES, np.float32)
    start = -raw.ctypes.data % VECTOR_BYTES // 4
    copy = raw[start : start + array.size].reshape(array.shape)
    copy[...] = array
    return copy


def unwritten(*shape: int) -> np.ndarray:
    return aligned(np.full(shape, np.nan, np.float32))


def random_values(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal values with a channel that stands out twentyfold, as in trained models."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    values[..., shape[-1] // 3] *= 20
    return values


def solo_team(head_size: int = 1) -> Team:
    """A team of one, in its first step."""
    scratch = unwritten(max(SCRATCH, scratch_size(head_size)))
    team = Team(new_board(), np.zeros(8, np.int64), scratch)
    begin_step(team)
    return team


# Tiles and reductions: raw addresses.


@pytest.mark.parametrize("columns", [LANES, PANEL, PANEL + LANES, 2 * PANEL + 3 * LANES])
@pytest.mark.parametrize("steps", [1, 2, 35, 130])
@pytest.mark.parametrize("rows", range(1, TILE_ROWS + 1))
def test_tiles_accumulate_one_chain_in_the_order_of_k(rows, steps, columns):
    """To the bit: each step is one fused multiply-add, whose product float64 holds exactly."""
    a, b = random_values(rows, steps + 3), aligned(random_values(steps, columns, seed=1))
    expected = np.zeros((rows, columns), np.float32)
    for k in range(steps):
        expected = (a[:, k, None].astype(np.float64) * b[k] + expected).astype(np.float32)
    tiles_that_fit = [tiles.wide_tile]
    if columns == PANEL:
        tiles_that_fit.append(tiles.panel_tile)
    if columns == LANES:
        tiles_that_fit.append(tiles.strip_tile)
    for tile in tiles_that_fit:
        c = unwritten(rows + 1, columns + 1)  # a row and a column more than the tile may touch
        where = (a.ctypes.data, a.strides[0], b.ctypes.data, b.strides[0], steps, c.ctypes.data, c.strides[0])
        tile(rows, *where, columns) if tile is tiles.wide_tile else tile(rows, *where)
        same_bits(c[:rows, :columns].copy(), expected)
        assert np.isnan(c[rows:]).all()
        assert np.isnan(c[:, columns:]).all()


@jit
def reductions_of(x, out):
    vectors = x.size // LANES
    out[0] = tiles.sum_lanes(tiles.address(x), vectors)
    out[1] = tiles.sum_squares_lanes(tiles.address(x), vectors)
    out[2] = tiles.max_lanes(tiles.address(x), vectors)


@jit
def fused(x, y, z):
    return tiles.fma(x, y, z)


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
    x = np.concatenate([np.linspace(-86.9, 88, 20001), [0, 1e-10, -1e-10]]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    check("exp", [activations.exp(v) for v in x], exact, exact)
    for low in (-1000, -87.5, -np.inf):
        assert activations.exp(np.float32(low)) == 0
    for high in (89, 1e4, np.inf):
        assert 1e38 < activations.exp(np.float32(high)) < np.inf
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


# Linear.


class Layer(NamedTuple):
    x: np.ndarray  # (M, K)
    weight: np.ndarray  # (N, K)
    bias: np.ndarray  # (N,)
    before: np.ndarray  # (M, N)  what `add` adds to


def random_layer(m: int, k: int, n: int, has_bias: bool = True) -> Layer:
    bias = random_values(n, seed=3) if has_bias else np.empty(0, np.float32)
    return Layer(random_values(m, k, seed=1), random_values(n, k, seed=2), bias, random_values(m, n, seed=4))


def packed(weight: np.ndarray, is_transposed: bool = False) -> np.ndarray:
    n, k = weight.shape[::-1] if is_transposed else weight.shape
    panels = unwritten(panel_count(n), k, PANEL)
    pack(weight, is_transposed, panels, 0, len(panels))
    return panels


def run_linear(layer: Layer, kind=activations.NONE, add=REPLACE, segments=None) -> np.ndarray:
    out = layer.before.copy() if add else unwritten(*layer.before.shape)
    segments = whole(layer.x.shape[1]) if segments is None else segments
    linear(solo_team(), out, layer.x, packed(layer.weight), layer.bias, kind, add, segments)
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_pack(shape):
    weight = random_values(*shape)
    panels = packed(weight)
    np.testing.assert_array_equal(panels, packed(np.ascontiguousarray(weight.T), True))
    columns = panels.transpose(0, 2, 1).reshape(-1, shape[1])  # (P * PANEL, K)
    same_bits(columns[: len(weight)].copy(), weight)
    assert not columns[len(weight) :].any()


def test_pack_writes_the_panels_it_is_asked_for():
    weight = random_values(3 * PANEL + 5, 7)
    panels = unwritten(4, 7, PANEL)
    pack(weight, False, panels, 1, 3)
    same_bits(panels[1:3], packed(weight)[1:3])
    assert np.isnan(panels[[0, 3]]).all()


@pytest.mark.parametrize("segmented", [False, True], ids=["whole", "quarters"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("n", [1, 5, PANEL, PANEL + 1, 2 * PANEL + 35])
@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_linear(m, k, n, has_bias, segmented):
    layer = random_layer(m, k, n, has_bias)
    segments = quarters(k, 1) if segmented else whole(k)
    x, weight, bias = (part.astype(np.float64) for part in layer[:3])
    expected = x @ weight.T + (bias if has_bias else 0)
    scale = np.abs(x) @ np.abs(weight).T + (np.abs(bias) if has_bias else 0)
    check("product", run_linear(layer, segments=segments), expected, scale)
    added = run_linear(layer, add=ADD, segments=segments)
    check("product", added, layer.before + expected, scale + np.abs(layer.before))


@ACTIVATIONS
@pytest.mark.parametrize("add", [REPLACE, ADD], ids=["replace", "add"])
def test_linear_then_activation(name, kind, add):
    """To the bit: `activate` over the product itself, then the sum."""
    layer = random_layer(11, 35, PANEL + 3)
    y = run_linear(layer)
    activations.activate(y.reshape(-1), kind)
    same_bits(run_linear(layer, kind, add), layer.before + y if add else y)


@pytest.mark.parametrize("k", [4, 5, 35, 130])
def test_four_segments_are_added_in_pairs(k):
    layer = random_layer(9, k, PANEL + 5)
    bounds = quarters(k, 1)
    sums = []
    for start, stop in itertools.pairwise(bounds):
        part = [np.ascontiguousarray(matrix[:, start:stop]) for matrix in layer[:2]]
        sums.append(run_linear(Layer(*part, layer.bias[:0], layer.before)))
    expected = (sums[0] + sums[1]) + (sums[2] + sums[3]) + layer.bias
    same_bits(run_linear(layer, segments=bounds), expected)


@pytest.mark.parametrize("rows", [*range(1, 14), 47, 48, 49, 97])
def test_a_row_of_linear_has_the_same_bits_among_any_number(rows):
    layer = random_layer(97, 35, PANEL + 5)
    alone = [run_linear(layer._replace(x=x[None], before=b[None])) for x, b in zip(layer.x, layer.before, strict=True)]
    for first in (0, 97 - rows):
        some = slice(first, first + rows)
        same_bits(run_linear(layer._replace(x=layer.x[some], before=layer.before[some])), np.concatenate(alone[some]))


def test_a_row_that_is_not_finite_stays_alone():
    layer = random_layer(13, 35, PANEL + 5)
    clean = run_linear(layer)
    layer.x[4] = np.nan
    layer.x[7, 3] = np.inf
    y = run_linear(layer)
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


# Layer norm and embedding.


def run_layer_norm(x, rows, weight, bias, epsilon=1e-5) -> np.ndarray:
    out = unwritten(len(rows), x.shape[1])
    layer_norm(solo_team(), out, x, np.asarray(rows, np.int32), weight, bias, np.float32(epsilon))
    return out


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


@pytest.mark.parametrize(("n", "width"), SHAPES)
def test_embed(n, width):
    vocab, length = 2 * PANEL + 3, 11
    random = np.random.default_rng(0)
    token_ids = np.concatenate([[vocab - 1], random.integers(vocab, size=n - 1)]).astype(np.int32)
    positions = random.integers(length, size=n).astype(np.int32)
    wte, wpe, x = random_values(vocab, width), random_values(length, width, seed=1), unwritten(n, width)
    embed(solo_team(), x, token_ids, positions, packed(wte), wpe)
    same_bits(x, wte[token_ids] + wpe[positions])


# Attention.


class Cache(NamedTuple):
    """One layer's: k (S, H, T / KEY_BLOCK, D, KEY_BLOCK), v (S, H, T, padded D)."""

    k: np.ndarray
    v: np.ndarray


def new_cache(sequences: int, heads: int, size: int, length: int) -> Cache:
    blocks = -(-length // KEY_BLOCK)
    k = unwritten(sequences, heads, blocks, size, KEY_BLOCK)
    return Cache(k, unwritten(sequences, heads, blocks * KEY_BLOCK, padded_head(size)))


def write(cache: Cache, qkv, positions, token_rows) -> None:
    write_kv(solo_team(), *cache, qkv, np.asarray(positions, np.int32), np.asarray(token_rows, np.int32))


def plain_keys(cache: Cache) -> np.ndarray:
    """(S, H, T, D)."""
    k = cache.k.transpose(0, 1, 2, 4, 3)  # (S, H, T / KEY_BLOCK, KEY_BLOCK, D)
    return k.reshape(*k.shape[:2], -1, k.shape[-1])


class Run(NamedTuple):
    """Some sequences of given lengths; the first `cached` positions of each are already in the cache."""

    qkv: np.ndarray  # (N, 3C), all positions of all sequences, end to end
    lengths: list[int]
    cached: list[int]
    heads: int

    @property
    def size(self) -> int:
        return self.qkv.shape[1] // (3 * self.heads)


def run_attend(run: Run, tiles_of=query_tiles) -> np.ndarray:
    """The new tokens' attention, (new tokens, C), after everything was written in two steps."""
    bounds = np.concatenate([[0], np.cumsum(run.lengths)])
    rows = np.arange(len(run.lengths))[::-1] + 1  # no sequence lies in the row of its number
    token_rows = np.repeat(rows, run.lengths).astype(np.int32)
    positions = np.concatenate([np.arange(length) for length in run.lengths]).astype(np.int32)
    is_new = positions >= np.repeat(run.cached, run.lengths)
    cache = new_cache(len(rows) + 1, run.heads, run.size, max(run.lengths))
    for part in (~is_new, is_new):
        write(cache, run.qkv[part], positions[part], token_rows[part])
    starts = np.concatenate([[0], np.cumsum(np.diff(bounds) - run.cached)]).astype(np.int32)
    qkv, out = run.qkv[is_new], unwritten(is_new.sum(), run.heads * run.size)
    scale, where = np.float32(run.size**-0.5), (positions[is_new], token_rows[is_new])
    attend(solo_team(run.size), out, qkv, *cache, *where, tiles_of(starts).astype(np.int32), scale)
    return out


def exact_attention(run: Run) -> np.ndarray:
    outs, start = [], 0
    for length, cached in zip(run.lengths, run.cached, strict=True):
        qkv = run.qkv[start : start + length].astype(np.float64).reshape(length, 3, run.heads, run.size)
        q, k, v = qkv.transpose(1, 0, 2, 3)  # (T, H, D)
        scale = float(np.float32(run.size**-0.5))
        out = reference.attend(
            q[cached:], k.swapaxes(0, 1), v.swapaxes(0, 1), np.arange(cached, length), scale
        )  # (N, H, D)
        outs.append(out.reshape(len(out), -1))
        start += length
    return np.concatenate(outs)


def random_run(lengths, cached, heads: int, size: int, spread: float = 1.0) -> Run:
    qkv = np.random.default_rng(size).standard_normal((sum(lengths), 3 * heads * size), np.float32)
    qkv[:, : 2 * heads * size] *= spread
    qkv[:, 2 * heads * size + size // 3] *= 20  # a value channel that stands out
    return Run(qkv, list(lengths), list(cached), heads)


@pytest.mark.parametrize("size", [1, 5, 16, 20])
def test_write_kv_writes_its_places_and_nothing_else(size):
    heads, random = 3, np.random.default_rng(size)
    cache, qkv = new_cache(4, heads, size, 130), random_values(40, 3 * heads * size)
    flat = random.choice(4 * 130, size=40, replace=False)
    token_rows, positions = flat // 130, flat % 130
    write(cache, qkv, positions, token_rows)
    keys, values = qkv.reshape(40, 3, heads, size)[:, 1], qkv.reshape(40, 3, heads, size)[:, 2]  # (N, H, D)
    k, v = plain_keys(cache), cache.v[..., :size]
    same_bits(k[token_rows, :, positions], keys)
    same_bits(v[token_rows, :, positions], values)
    assert (~np.isnan(k)).sum() == (~np.isnan(cache.v)).sum() == qkv[:, heads * size * 2 :].size


@pytest.mark.parametrize("size", [1, 5, 16, 20, 64, 80, 128])
@pytest.mark.parametrize("length", [1, 6, 63, 64, 65, 128, 129])
def test_attend(length, size):
    """A whole prompt, the last tokens of one, and a decode step, beside each other."""
    run = random_run([length, length, length, 7], [0, max(length - 7, 0), length - 1, 3], 2, size, spread=1.3)
    check("attention", run_attend(run), exact_attention(run), np.abs(run.qkv[:, -2 * size :]).max())


@pytest.mark.parametrize("size", [5, 64])
def test_a_query_has_the_same_bits_in_any_tile(size):
    whole_prompt = random_run([131], [0], 2, size)
    together = run_attend(whole_prompt)
    same_bits(run_attend(whole_prompt, lambda starts: np.arange(starts[-1] + 1)), together)  # each token a tile
    same_bits(run_attend(whole_prompt, lambda starts: np.array([0, 1, 3, *range(4, 132, 4)[1:], 131])), together)
    for length, cached in ((1, 0), (64, 63), (65, 63), (70, 60), (129, 127)):
        part = Run(whole_prompt.qkv[:length], [length], [cached], 2)
        same_bits(run_attend(part), together[cached:length])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("length", [5, 64, 130])
def test_attend_with_extreme_scores(length, sign):
    """Scores of 1e4 and of -1e4: weights from 0 to 1 and nothing in between overflows."""
    run = random_run([length], [0], 2, 16, spread=1.0)
    run.qkv[:, :32] = 50 * sign
    run.qkv[:, 32:64] = 50 * (1 + 1e-2 * np.arange(length)[:, None] % 0.07)
    out, largest = run_attend(run), np.abs(run.qkv[:, 64:]).max()
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
    bounds = query_tiles(starts)
    assert (bounds[0], bounds[-1]) == (0, starts[-1])
    assert set(starts) <= set(bounds.tolist())  # no tile holds tokens of two sequences
    assert 1 <= np.diff(bounds).min() <= np.diff(bounds).max() <= TILE_ROWS
    assert len(bounds) - 1 == sum(-(-length // TILE_ROWS) for length in lengths)
