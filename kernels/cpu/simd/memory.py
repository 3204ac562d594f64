"""Arrays that start on a vector's boundary, which the tiles' loads rely on."""

import math

import numpy as np

from tinygpt.kernels.cpu.simd.vector_ir import VECTOR_BYTES


def zeros(shape: tuple[int, ...], dtype=np.float32) -> np.ndarray:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + VECTOR_BYTES, np.uint8)
    start = -raw.ctypes.data % VECTOR_BYTES
    return raw[start : start + size].view(dtype).reshape(shape)
