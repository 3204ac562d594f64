"""Choose the kernel package once; everything above calls it by the same names."""

import importlib
from types import ModuleType

from tinygpt.errors import RequestError

# Which checkpoint dtypes each backend computes with.
DTYPES = {"cpu": ("float32",), "reference": ("float32",)}


def load_backend(device: str, dtype: str) -> ModuleType:
    """Import the kernels of `device`; RequestError if it or `dtype` is not implemented."""
    if device not in DTYPES:
        raise RequestError(f"device is {device!r} and must be one of {', '.join(map(repr, DTYPES))}.")
    if dtype not in DTYPES[device]:
        allowed = ", ".join(map(repr, DTYPES[device]))
        raise RequestError(f"dtype is {dtype!r} and device {device!r} computes in {allowed} only.")
    return importlib.import_module(f"tinygpt.kernels.{device}")
