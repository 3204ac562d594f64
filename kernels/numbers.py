"""NumPy arithmetic that backends share: bfloat16, rows of an int8 KV cache, settings of rows of logits.

A row is (D + 4,) int8: D whole numbers, the largest 127, and a float32 scale.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .backend import WeightError

SCALE_BYTES = 4
LEVELS = np.float32(127)
ALL_TOKENS = 2**31 - 1
MAX_TEMPERATURE = 2.0**30  # above it, different logits may be divided to one denormal number
LEAST_ROW = np.float32(2.0**-112)  # a smaller row is zeros: 2**14 times its inverse must be finite


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Return the bits (uint16) of the nearest bfloat16, ties to even; NaN stays NaN."""
    x = np.ascontiguousarray(x, np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


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
    """Return scores (H, T, T), -inf for later positions, of queries (T, C) and a KV cache's keys (H, T, D).

    attention: of ModelConfig.
    """
    heads, length, _ = keys.shape
    q = q.reshape(length, heads, -1).swapaxes(0, 1)  # (H, T, D)
    scores = q @ from_cache(keys).swapaxes(1, 2)  # (H, T, T)
    scores *= np.float32(attention.scale)
    if attention.slopes:
        back = np.subtract.outer(np.arange(length), np.arange(length)).astype(np.float32)  # (T, T)
        scores -= np.float32(attention.slopes)[:, None, None] * back
    scores[:, ~np.tri(length, dtype=bool)] = -np.inf
    return scores


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


def check_range(name: str, weight: np.ndarray, dtype: str, largest: float | None) -> None:
    """Raise WeightError for a finite number beyond the dtype's largest; None: float32's."""
    if largest is None:
        return
    found = np.abs(weight).max(initial=0, where=np.isfinite(weight))
    if found > largest:
        held = f"whose largest number is {largest:g}, and {name} has {found:g}"
        raise WeightError(f"is {dtype!r}, {held}: use 'bfloat16' or 'float32'.")


def stacked(checkpoint, names: list[str]) -> np.ndarray:
    return np.stack([checkpoint.tensor(name) for name in names])
