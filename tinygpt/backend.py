"""Choose the kernel package once; everything above calls it by the same names."""

import importlib
from types import ModuleType

from tinygpt.errors import RequestError

# Which precisions each backend computes with: weights, and the KV cache.
DTYPES = {"cpu": ("float32", "bfloat16", "int8", "int4"), "reference": ("float32",)}
KV_CACHE_DTYPES = ("float32", "bfloat16")


def load_backend(device: str, dtype: str) -> ModuleType:
    """Import the kernels of `device`; RequestError if it or `dtype` is not implemented."""
    if device not in DTYPES:
        raise RequestError(f"device is {device!r} and must be one of {', '.join(map(repr, DTYPES))}.")
    if dtype not in DTYPES[device]:
        allowed = ", ".join(map(repr, DTYPES[device]))
        raise RequestError(f"dtype is {dtype!r} and device {device!r} computes in {allowed} only.")
    return importlib.import_module(f"tinygpt.kernels.{device}")


def resolve_kv_cache_dtype(kv_cache_dtype: str, device: str, dtype: str) -> str:
    """The precision of the KV cache: "auto" is float32 for float32 weights, and bfloat16 for all others."""
    allowed = KV_CACHE_DTYPES if device == "cpu" else ("float32",)
    if kv_cache_dtype == "auto":
        return "float32" if dtype == "float32" else "bfloat16"
    if kv_cache_dtype not in allowed:
        listed = ", ".join(map(repr, ("auto", *allowed)))
        raise RequestError(f"kv_cache_dtype is {kv_cache_dtype!r} and must be one of {listed}.")
    return kv_cache_dtype
