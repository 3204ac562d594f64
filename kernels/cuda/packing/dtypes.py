"""The dtypes of weights and of activations, and how NumPy holds them: bfloat16 as uint16."""

from typing import Any

import numpy as np

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
