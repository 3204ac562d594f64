"""Arithmetic that backends share: bfloat16, rows of an int8 KV cache, draws from rows of logits, Philox.

A row of a cache is (D + 4,) int8: D whole numbers, the largest 127, and a float32 scale.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .backend import WeightError

SCALE_BYTES = 4
LEVELS = np.float32(127)
ALL_TOKENS = 2**31 - 1
MAX_TEMPERATURE = 2.0**30  # above it, different logits may be divided to one denormal number
LEAST_ROW = np.float32(2.0**-112)  # a smaller row is zeros: 2**14 times its inverse must be finite
BFLOAT16_NAN = np.uint16(0x7FC0)
ROUNDING = np.float32(1.5 * 2**23)  # a sum with it is whole, and has the nearest whole number in its low bits
INFINITE_BITS = 0x7F800000  # of a float32
SIZE_BITS = 0x7FFFFFFF  # of a float32, without the sign
BUCKETS = 1024  # of scores: the search for a border sums by buckets first
BUCKETS_PER_UNIT = np.float32(BUCKETS / 104)  # exp(-104) is 0 in float32

# Philox4x64-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
MULTIPLIER_0 = np.uint64(0xD2E7470EE14C6C93)
MULTIPLIER_1 = np.uint64(0xCA5A826395121157)
INCREMENT_0 = np.uint64(0x9E3779B97F4A7C15)
INCREMENT_1 = np.uint64(0xBB67AE8584CAA73B)
ROUNDS = 10
ZERO = np.uint64(0)
ONE = np.uint64(1)
LOW_HALF = np.uint64(0xFFFFFFFF)
HALF_BITS = np.uint64(32)
UNUSED_BITS = np.uint64(11)  # a float64 in [0, 1) has 53


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Return the bits (uint16) of the nearest bfloat16, ties to even; NaN stays NaN."""
    x = np.ascontiguousarray(x, np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), BFLOAT16_NAN, rounded).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    wide = bits.astype(np.uint32)
    wide <<= 16  # bfloat16 is the upper half of a float32
    return wide.view(np.float32)


def to_rows(x: np.ndarray) -> np.ndarray:
    """Quantize float32 (..., D) to rows. An infinite row has scale NaN."""
    largest = np.abs(x).max(-1, keepdims=True)  # (..., 1)
    is_finite = np.isfinite(largest)
    is_some = is_finite & (largest >= LEAST_ROW)
    inverse = np.divide(LEVELS, largest, out=np.zeros_like(largest), where=is_some)
    # Exact in float64: one rounding, as in a fused multiply-add.
    whole = np.rint(np.where(is_finite, x, 0).astype(np.float64) * inverse)
    scales = np.where(is_finite, np.where(is_some, largest / LEVELS, 0), np.nan).astype(np.float32)
    return np.concatenate([whole.astype(np.int8), scales.view(np.int8)], axis=-1)


def from_rows(rows: np.ndarray) -> np.ndarray:
    return rows[..., :-SCALE_BYTES] * np.ascontiguousarray(rows[..., -SCALE_BYTES:]).view(np.float32)


def from_cache(rows: np.ndarray) -> np.ndarray:
    """Return keys or values (..., D) of a KV cache's rows in any of its dtypes."""
    decode = {np.dtype(np.uint16): from_bfloat16, np.dtype(np.int8): from_rows}
    return decode.get(rows.dtype, np.asarray)(rows)


def even_bounds(count: int, parts: int) -> list[int]:
    """Return the bounds (parts + 1,) of even parts, of which the first may be one longer."""
    share, longer = divmod(count, parts)
    return [i * share + min(i, longer) for i in range(parts + 1)]


def even_run(count: int, part: int, parts: int) -> range:
    bounds = even_bounds(count, parts)
    return range(bounds[part], bounds[part + 1])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the log-softmax of rows (R, V) in float32, as transformers. Infinite rows give NaN."""
    logits = np.asarray(logits)  # which may be a GPU's
    with np.errstate(invalid="ignore"):
        rows = logits - logits.max(-1, keepdims=True)  # (R, V)
        rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
    return rows


def attention_scores(q: np.ndarray, keys: np.ndarray, attention: Any) -> np.ndarray:
    """Return scores (H, T, T), -inf for hidden positions, of queries (T, C) and a KV cache's keys (H, T, D).

    attention: of ModelConfig.
    """
    heads, length, _ = keys.shape
    q = q.reshape(length, heads, -1).swapaxes(0, 1)  # (H, T, D)
    scores = q @ from_cache(keys).swapaxes(1, 2)  # (H, T, T)
    scores *= np.float32(attention.scale)
    back = np.subtract.outer(np.arange(length), np.arange(length))  # (T, T)
    if attention.slopes:
        scores -= np.float32(attention.slopes)[:, None, None] * back.astype(np.float32)
    scores[:, is_hidden(back, attention.window)] = -np.inf
    return scores


def is_hidden(back: np.ndarray, window: int | None) -> np.ndarray:
    """Return whether a query sees no key at distances `back`, of any shape."""
    is_later = back < 0
    return is_later if window is None else is_later | (back >= window)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights


class Warpers(NamedTuple):
    """What R rows of logits are drawn by, (R,) float64 each: fields of SamplingParams and `num_tokens`.

    A default is off.
    """

    temperature: Any = 1  # 0: the greatest logit is taken
    top_k: Any = 0
    top_p: Any = 1
    min_p: Any = 0
    num_tokens: Any = ALL_TOKENS  # a token is drawn from its row's first scores alone: later ids are of none


def top_of(warpers: Warpers) -> np.ndarray:
    """Return how many greatest logits (R,), with ties, decide each row's token; below 1: all of them."""
    top_k = np.where(warpers.temperature > MAX_TEMPERATURE, 0, warpers.top_k)
    return np.where(warpers.temperature == 0, 1, top_k)


class Ragged(NamedTuple):
    """Arrays of different lengths, end to end."""

    values: np.ndarray
    bounds: np.ndarray  # (count + 1,) int64: array i is values[bounds[i]:bounds[i + 1]]

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray]) -> "Ragged":
        bounds = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([array.size for array in arrays], out=bounds[1:])
        return cls(np.concatenate(arrays), bounds)

    def part(self, i: int) -> np.ndarray:
        return self.values[self.bounds[i] : self.bounds[i + 1]]


class Processors(NamedTuple):
    """Biases and penalties of P rows of logits."""

    rows: np.ndarray  # (P,) int64
    token_ids: Ragged  # int32, the prompt and the output of each row
    num_prompt_tokens: np.ndarray  # (P,) int64
    repetition_penalty: np.ndarray  # (P,) float32
    frequency_penalty: np.ndarray  # (P,) float32
    presence_penalty: np.ndarray  # (P,) float32
    bias_ids: Ragged  # int32
    biases: Ragged  # float32, one for each of bias_ids


def multiply_high(x, y):
    """Return the upper 64 bits of x * y, of uint64, in code that Numba compiles."""
    x_low = x & LOW_HALF
    x_high = x >> HALF_BITS
    y_low = y & LOW_HALF
    y_high = y >> HALF_BITS
    middle = x_high * y_low + (x_low * y_low >> HALF_BITS)
    other = x_low * y_high + (middle & LOW_HALF)
    return x_high * y_high + (middle >> HALF_BITS) + (other >> HALF_BITS)


def philox(multiply_high: Callable) -> Callable:
    """Return f(seed, sample_index, position) of uint64: the 53 bits of the reference's `uniform`."""

    def random_bits(key_0, key_1, position):
        a = position + ONE
        b = c = d = ZERO
        for _ in range(ROUNDS):
            a, b, c, d = (
                multiply_high(MULTIPLIER_1, c) ^ b ^ key_0,
                MULTIPLIER_1 * c,
                multiply_high(MULTIPLIER_0, a) ^ d ^ key_1,
                MULTIPLIER_0 * a,
            )
            key_0 += INCREMENT_0
            key_1 += INCREMENT_1
        return a >> UNUSED_BITS

    return random_bits


def stacked_adapters(
    adapters: Sequence[dict[str, tuple]], modules: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Return LoRA's factors of A adapters for L modules, (A, L, r, K) and (A, L, r, N), with zeros up to the rank r.

    adapters: {module: (down (r, K), up (N, r))}
    """
    factors = {
        (a, layer): adapter[module]
        for a, adapter in enumerate(adapters)
        for layer, module in enumerate(modules)
        if module in adapter
    }
    shapes = [(len(down), down.shape[1], len(up)) for down, up in factors.values()]
    r, k, n = map(max, zip(*shapes, strict=True)) if shapes else (0, 0, 0)
    downs = np.zeros((len(adapters), len(modules), r, k), np.float32)
    ups = np.zeros((len(adapters), len(modules), r, n), np.float32)
    for place, (down, up) in factors.items():
        downs[place][: len(down)] = down
        ups[place][: len(down)] = up.T
    return downs, ups


def check_range(name: str, weight: np.ndarray, dtype: str, largest: float | None) -> None:
    """Raise WeightError for a finite number beyond the dtype's largest; None: float32's."""
    if largest is None:
        return
    greatest = np.abs(weight).max(initial=0, where=np.isfinite(weight))
    if greatest > largest:
        held = f"whose largest number is {largest:g}, and {name} has {greatest:g}"
        raise WeightError(f"is {dtype!r}, {held}: use 'bfloat16' or 'float32'.")


def stacked(checkpoint, names: list[str]) -> np.ndarray:
    return np.stack([checkpoint.tensor(name) for name in names])
