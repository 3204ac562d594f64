"""CUDA attention around the borders of key blocks and tiles.

Caches are NaN in other slots and layers, and after the last position of a sequence.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from support.cuda_device import SimulatedDevice
from support.examples import daily
from support.kernel_tools import bfloat16_bits, from_bits, same_bits, unwritten
from support.ptx_machine import simulate
from tinygpt.kernels.cuda.kv_cache import LAYOUTS, KVCache, write_positions
from tinygpt.kernels.cuda.layers.attention import (
    QUERY_TILE,
    TILE_WARPS,
    attend_decode_kernel,
    attend_prefill_kernel,
    tile_blocks,
)
from tinygpt.kernels.cuda.layers.attention_products import KEY_BLOCK
from tinygpt.kernels.cuda.layers.epilogue import Heads
from tinygpt.kernels.cuda.params import NUMBERS
from tinygpt.kernels.numbers import from_rows, to_rows
from tinygpt.kernels.reference import model as reference
from tinygpt.weights import config

pytestmark = pytest.mark.usefixtures("compute_capability")

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])  # of the cache
LAYERS = 2
LAYER = 1
ROWS = 7
LENGTHS = (1, 63, 64, 65, 130)
NO_SLOPES = np.zeros(1, np.float32)
# Against the largest value. bfloat16: weights and the result are each rounded to 8 bits, half a unit being 2**-9.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2.0**-8, "int8": 2.0**-8}


@dataclass(frozen=True)
class Tokens:
    """One sequence: q, k and v of all its positions, (T, H, D) float32, rounded to the dtype."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    row: int


@dataclass(frozen=True)
class Attention:
    """Runs steps on sequences. A step is a list of (sequence, first position, position after the last)."""

    dtype: str
    heads: int
    size: int
    positions: int = 3 * KEY_BLOCK

    @property
    def family(self) -> str:
        return "bfloat16" if self.dtype == "int8" else self.dtype

    @property
    def kernel(self) -> tuple:
        return self.padded_size, self.family, False, self.dtype == "int8"

    @property
    def padded_size(self) -> int:
        return -(-self.size // 32) * 32

    @property
    def width(self) -> int:
        return -(-self.heads * self.size // 64) * 64

    @property
    def scale(self) -> np.float32:
        return np.float32(self.size**-0.5)

    def sequences(self, lengths, seed: int = 0) -> list[Tokens]:
        random = np.random.default_rng(seed)
        rows = (5, 0, 3, 6, 1)
        made = []
        for length, row in zip(lengths, rows, strict=False):
            q, k, v = random.standard_normal((3, length, self.heads, self.size), np.float32)
            k[:, :, 0] *= 4
            q, k, v = (self.rounded(x) for x in (q, k, v))
            if self.dtype == "int8":
                k, v = (from_rows(to_rows(x)) for x in (k, v))
            made.append(Tokens(q, k, v, row))
        return made

    def rounded(self, values: np.ndarray) -> np.ndarray:
        return values if self.dtype == "float32" else from_bits(bfloat16_bits(values))

    def stored(self, values: np.ndarray) -> np.ndarray:
        """Return queries in the dtype, with dims padded with 0."""
        padding = [(0, 0)] * (values.ndim - 1) + [(0, self.padded_size - self.size)]
        values = np.pad(values, padding)
        return values if self.dtype == "float32" else (values.view(np.uint32) >> 16).astype(np.uint16)

    def caches(self, step) -> list[np.ndarray]:
        layout = LAYOUTS[self.dtype]
        sizes = ROWS, self.heads, self.positions
        row_size = self.padded_size + layout.scale_bytes
        whole = [unwritten(LAYERS, *sizes, row_size, dtype=layout.array_type).ravel() for _ in "kv"]
        k, v = (array.reshape(LAYERS, -1)[LAYER] for array in whole)
        cache = KVCache(SimulatedDevice(), layout, k, v, 1, *sizes, *2 * (self.padded_size,))
        padding = [(0, 0), (0, 0), (0, self.padded_size - self.size)]
        for tokens, _, stop in step:
            rows = (np.pad(x[:stop], padding).swapaxes(0, 1)[None] for x in (tokens.k, tokens.v))
            write_positions(cache, tokens.row, 0, *rows)
        return whole

    def inputs(self, step) -> Heads:
        q = np.concatenate([self.stored(tokens.q[start:stop]) for tokens, start, stop in step])
        positions = np.concatenate([np.arange(start, stop, dtype=np.int32) for _, start, stop in step])
        token_slots = np.concatenate(
            [np.full(stop - start, tokens.row, np.int32) for tokens, start, stop in step]
        )
        sizes = ROWS, self.positions, self.heads, self.size, self.padded_size
        return Heads(q.ravel(), *self.caches(step), positions, token_slots, *sizes)

    def unwritten_result(self, count: int) -> np.ndarray:
        return unwritten(count * self.width, dtype=np.float32 if self.dtype == "float32" else np.uint16)

    def result(self, attended: np.ndarray) -> np.ndarray:
        """Return (N, H, D) float32. Assert that nothing else was written."""
        attended = attended if self.dtype == "float32" else from_bits(attended)
        attended = attended.reshape(-1, self.width)
        used = self.heads * self.size
        assert np.isnan(attended[:, used:]).all()
        return attended[:, :used].reshape(-1, self.heads, self.size)

    def decode(self, step, surplus: int = 0, threads: int = 64) -> np.ndarray:
        """Each of the step's runs is one token; `surplus` more tokens are launched than there are."""
        count = len(step) + surplus
        max_blocks = self.positions // KEY_BLOCK
        warps = threads // 32
        lone = np.full(count, -1, np.int32)
        lone[: len(step)] = range(len(step))
        partials = unwritten(count * self.heads * max_blocks * (2 + self.padded_size))
        attended = self.unwritten_result(count)
        merges = np.zeros(count * self.heads, np.int32)
        grid = (-(-max_blocks // warps), self.heads, count)
        given = attended, merges, partials, self.inputs(step), LAYER, lone
        given = (*given, self.width, self.scale, NO_SLOPES, max_blocks)
        simulate(attend_decode_kernel(*self.kernel), grid, threads, *given)
        assert not merges.any()  # the next step counts from 0
        result = self.result(attended)
        assert np.isnan(result[len(step) :]).all()
        return result[: len(step)]

    def prefill(self, step) -> np.ndarray:
        tiles = query_tiles(step)
        heads = self.inputs(step)
        attended = self.unwritten_result(len(heads.positions))
        grid = (len(tiles), self.heads, tile_blocks(NUMBERS[self.family]))
        given = attended, heads, LAYER, np.array(tiles, np.int32).ravel(), self.width, self.scale, NO_SLOPES
        simulate(attend_prefill_kernel(*self.kernel), grid, 32 * TILE_WARPS, *given)
        return self.result(attended)

    def exact(self, step) -> np.ndarray:
        results = []
        attention = config.Attention(float(self.scale))
        for tokens, start, stop in step:
            k, v = (x[:stop].swapaxes(0, 1).astype(np.float64) for x in (tokens.k, tokens.v))  # (H, T, D)
            q = tokens.q[start:stop].astype(np.float64)
            results.append(reference.attend(q, k, v, np.arange(start, stop), attention))
        return np.concatenate(results)

    def check(self, actual: np.ndarray, step) -> None:
        largest = max(np.abs(tokens.v).max() for tokens, _, _ in step)
        assert np.abs(actual - self.exact(step)).max() <= TOLERANCES[self.dtype] * largest


def query_tiles(step) -> list[tuple[int, int]]:
    bounds = [0, *itertools.accumulate(stop - start for _, start, stop in step)]
    return [
        (n, min(n + QUERY_TILE, end))
        for first, end in itertools.pairwise(bounds)
        for n in range(first, end, QUERY_TILE)
    ]


def newest(sequences) -> list:
    return [(tokens, len(tokens.q) - 1, len(tokens.q)) for tokens in sequences]


DECODED = [
    *((3, 16, "float32"), (3, 16, "bfloat16"), (1, 80, "bfloat16")),
    *((1, 64, "float32"), (2, 64, "bfloat16")),
    *((1, size, "int8") for size in (16, 64, 128)),
    *((1, 80, "float32"), (1, 80, "int8")),
]
DAILY_DECODED = [(3, 16, "float32"), (3, 16, "bfloat16"), (1, 80, "bfloat16"), (1, 16, "int8")]


@pytest.mark.parametrize(("heads", "size", "dtype"), daily(DECODED, DAILY_DECODED))
def test_decode(heads, size, dtype):
    attention = Attention(dtype, heads, size)
    step = newest(attention.sequences(LENGTHS))
    attention.check(attention.decode(step, surplus=1), step)


MIXED = [
    *((2, 16, "float32"), (1, 64, "bfloat16"), (2, 80, "bfloat16")),
    *((2, size, "int8") for size in (64, 128)),
    *((1, 80, "float32"), (2, 80, "int8")),
]
DAILY_MIXED = [(2, 16, "float32"), (1, 64, "bfloat16"), (2, 64, "int8")]


@pytest.mark.parametrize(("heads", "size", "dtype"), daily(MIXED, DAILY_MIXED))
def test_a_mixed_step(heads, size, dtype):
    """Whole prompts, the end of one, and single tokens."""
    attention = Attention(dtype, heads, size)
    lengths = (1, 5, 64, 65, 130)
    starts = (0, 0, 63, 62, 126)
    step = [(t, start, len(t.q)) for t, start in zip(attention.sequences(lengths), starts, strict=True)]
    attention.check(attention.prefill(step), step)


BORDERS = (0, 1, 62, 63, 64, 65, 76, 95, 121, 127, 128, 129)


@DTYPES
def test_a_token_has_the_same_bits_in_decode_and_in_prefill(dtype):
    attention = Attention(dtype, 1, 16)
    (tokens,) = attention.sequences([130])
    whole = (58 if dtype == "float32" else 0, 130)  # the others take their time
    prefilled = attention.prefill([(tokens, *whole)])
    for position in BORDERS:
        if position >= whole[0]:
            decoded = attention.decode([(tokens, position, position + 1)])
            same_bits(decoded, prefilled[position - whole[0]][None])


@pytest.mark.parametrize(
    ("dtype", "start", "cuts"),
    [
        *(("float32", 60, (64, 66)), ("bfloat16", 0, (1, 63, 64, 66)), ("bfloat16", 0, (40, 104, 129))),
        ("int8", 0, (1, 63, 104, 129)),
    ],
)
def test_a_prompt_has_the_same_bits_however_it_is_cut(dtype, start, cuts):
    attention = Attention(dtype, 1, 40)
    (tokens,) = attention.sequences([68 if dtype == "float32" else 130])
    bounds = [start, *cuts, len(tokens.q)]
    parts = [attention.prefill([(tokens, *part)]) for part in itertools.pairwise(bounds)]
    same_bits(np.concatenate(parts), attention.prefill([(tokens, start, len(tokens.q))]))


@DTYPES
def test_a_sequence_of_nan_spoils_itself_alone(dtype):
    attention = Attention(dtype, 2, 16)
    sequences = attention.sequences((63, 65, 66))
    last = [(t, len(t.q) - 3, len(t.q)) for t in sequences]
    expected = [attention.decode(newest(sequences)), attention.prefill(last)]
    for array in (sequences[1].q, sequences[1].k, sequences[1].v):
        array[...] = np.float32(np.nan)
    actual = [attention.decode(newest(sequences)), attention.prefill(last)]
    for before, after in zip(expected, actual, strict=True):
        spoilt = len(before) // 3
        assert np.isnan(after[spoilt : 2 * spoilt]).all()
        after[spoilt : 2 * spoilt] = before[spoilt : 2 * spoilt]
        same_bits(after, before)


@DTYPES
def test_values_of_a_later_block_reach_no_query_before_it(dtype):
    """Of a warp's queries, two are before the block's border."""
    attention = Attention(dtype, 1, 16)
    (tokens,) = attention.sequences([70])
    expected = attention.prefill([(tokens, 62, 70)])
    tokens.v[64:] = np.float32(np.nan)
    actual = attention.prefill([(tokens, 62, 70)])
    same_bits(actual[:2], expected[:2])
    assert np.isnan(actual[2:]).all()


@DTYPES
def test_a_nan_among_finite_keys_shows(dtype):
    """Not as a key that weighs nothing: a maximum passes by it, the sum does not."""
    attention = Attention(dtype, 1, 16)
    (tokens,) = attention.sequences([70])
    tokens.k[3] = np.float32(np.nan)
    assert np.isnan(attention.decode([(tokens, 69, 70)])).all()
    assert np.isnan(attention.prefill([(tokens, 66, 70)])).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_later_scores_dwarf_earlier_ones(dtype):
    """The maximum rises by 1e4 at a block's border: earlier keys have weight 0. Later it may fall as much."""
    attention = Attention(dtype, 1, 16)
    (tokens,) = attention.sequences([130])
    tokens.q[...], tokens.k[...] = 50, -50
    tokens.k[64] = 50
    step = [(tokens, 126, 130)]
    for result in (attention.prefill(step), attention.decode([(tokens, 129, 130)])):
        same_bits(result, np.broadcast_to(tokens.v[64], result.shape))
    (early,) = attention.decode([(tokens, 63, 64)])
    assert np.abs(early - tokens.v[:64].mean(0)).max() < 2.0**-8
