"""Keys and values of an int8 cache outside of it: a row (D + 4,) int8 for each head and position.

Its last four bytes are its scale, a float32, which multiplies the whole numbers before them. Of these the largest is
127 or -127.
"""

import numpy as np

SCALE_BYTES = 4
LEVELS = np.float32(127)
NOTHING = np.float32(2.0**-112)  # what is smaller is taken for zeros: its inverse must stay finite, and 2**14 times it


def to_rows(x: np.ndarray) -> np.ndarray:
    """float32 (..., D) as rows (..., D + 4), quantised as in the CPU's kernel. What is not finite has scale NaN."""
    largest = np.abs(x).max(-1, keepdims=True)  # (..., 1)
    is_finite = np.isfinite(largest)
    is_some = is_finite & (largest >= NOTHING)
    inverse = np.divide(LEVELS, largest, out=np.zeros_like(largest), where=is_some)
    # A product of two float32 is exact in float64: one rounding, as in a fused multiply-add.
    whole = np.rint(np.where(is_finite, x, 0).astype(np.float64) * inverse)
    scales = np.where(is_finite, np.where(is_some, largest / LEVELS, 0), np.nan).astype(np.float32)
    return np.concatenate([whole.astype(np.int8), scales.view(np.int8)], axis=-1)


def from_rows(rows: np.ndarray) -> np.ndarray:
    """Rows (..., D + 4) as float32 (..., D)."""
    return rows[..., :-SCALE_BYTES] * scales_of(rows)


def scales_of(rows: np.ndarray) -> np.ndarray:
    """The scales (..., 1) float32 of rows (..., D + 4)."""
    return np.ascontiguousarray(rows[..., -SCALE_BYTES:]).view(np.float32)
