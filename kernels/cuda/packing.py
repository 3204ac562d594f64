"""How weights lie in the device's memory: in panels of 8 features, in the order in which the lanes of a warp read them.

A step is 64 of K. In a panel's step, lane 4 g + q (g, q: its place in a fragment of `mma_bfloat16`) holds feature g of
the panel, 16 of the 64 numbers, so that a warp reads 512 contiguous bytes with each load:
    bfloat16: two loads of 8 numbers, k = 32 h + 8 q + i
    int8: one load of 16 numbers, the same ones
    float32: four loads of 4 numbers, k = 16 p + 4 q + i
Features and K are filled up with zeros.
"""

from typing import Any

import numpy as np

OUT_TILE = 8
STEP = 64
STEP_SIZE = OUT_TILE * STEP  # numbers
# The sum over K is cut into 8 runs of whole steps, each added up in order, and those in order too: whoever adds.
SEGMENTS = 8


def panel_count(n: int) -> int:
    return -(-n // OUT_TILE)


def step_count(k: int) -> int:
    return -(-k // STEP)


def padded_columns(columns: int) -> int:
    """Numbers of a row of activations: whole steps."""
    return step_count(columns) * STEP


def pack(weight: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """weight (N, K) float32 as panels, flat, and a scale for each feature: ones but for int8.

    An int8 is the weight over its feature's largest absolute value, times 127, rounded to the nearest, ties to even.
    """
    n, k = weight.shape
    panels, steps = panel_count(n), step_count(k)
    padded = np.zeros((panels * OUT_TILE, steps * STEP), np.float32)
    padded[:n, :k] = weight
    scales = np.ones(panels * OUT_TILE, np.float32)
    if dtype == "float32":
        by_lane = padded.reshape(panels, OUT_TILE, steps, 4, 4, 4).transpose(0, 2, 3, 1, 4, 5)  # (P, steps, p, g, q, i)
    elif dtype == "bfloat16":
        lanes = to_bfloat16(padded).reshape(panels, OUT_TILE, steps, 2, 4, 8)
        by_lane = lanes.transpose(0, 2, 3, 1, 4, 5)  # (P, steps, h, g, q, i)
    else:
        greatest = np.abs(padded).max(1)
        scales = np.where(greatest > 0, greatest / np.float32(127), np.float32(1)).astype(np.float32)
        lanes = np.rint(padded / scales[:, None]).astype(np.int8).reshape(panels, OUT_TILE, steps, 2, 4, 8)
        by_lane = lanes.transpose(0, 2, 1, 4, 3, 5)  # (P, steps, g, q, h, i)
    return np.ascontiguousarray(by_lane).ravel(), scales


ARRAY_TYPES = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}


def array_type(dtype: str) -> Any:
    return ARRAY_TYPES[dtype]


def item_bytes(dtype: str) -> int:
    return np.dtype(array_type(dtype)).itemsize


def family_of(dtype: str) -> str:
    """The precision that activations are kept in beside weights of `dtype`."""
    return "float32" if dtype == "float32" else "bfloat16"


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16, ties to even, as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """float32 of bfloat16 that are given as uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
