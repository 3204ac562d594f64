"""The order of numbers in the device's memory: dtypes, and weights in panels of 8 features.

A step is 64 of K. In a panel's step, lane 4 g + q (as in `mma_bfloat16`) holds feature g, 16 of the 64 numbers, so that
a warp reads 512 contiguous bytes a load:
    bfloat16: two loads of 8 numbers, k = 32 h + 8 q + i
    int8: one load of 16 numbers, in the same order
    float32: four loads of 4 numbers, k = 16 p + 4 q + i
"""

from typing import Any

import numpy as np

from tinygpt.kernels.host import to_bfloat16

OUT_TILE = 8  # features of a panel
STEP = 64
STEP_SIZE = OUT_TILE * STEP  # numbers
# A sum over K is cut into 8 runs of whole steps. Each is added in order, then the runs in order, in every kernel.
SEGMENTS = 8
ARRAY_TYPES = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}


def array_type(dtype: str) -> Any:
    return ARRAY_TYPES[dtype]


def item_bytes(dtype: str) -> int:
    return np.dtype(array_type(dtype)).itemsize


def family_of(dtype: str) -> str:
    """Return the dtype of activations for weights of `dtype`."""
    return "float32" if dtype == "float32" else "bfloat16"


def panel_count(n: int) -> int:
    return -(-n // OUT_TILE)


def step_count(k: int) -> int:
    return -(-k // STEP)


def padded_columns(columns: int) -> int:
    return step_count(columns) * STEP


def pack(weight: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return weight (N, K) float32 as flat panels, padded with zeros, and a scale for each feature, 1 unless int8.

    An int8 is the weight over its feature's largest absolute value, times 127, rounded, ties to even.
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
