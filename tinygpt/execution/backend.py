"""The look-up of a backend: the kernel package of a device, whose exports the engine calls by the same names."""

import importlib
from pathlib import Path
from types import ModuleType

from tinygpt.errors import RequestError
from tinygpt.kernels.backend import DeviceError
from tinygpt.weights.config import STORAGE_DTYPE, ModelConfig

DEVICES = ("cpu", "cuda", "reference")  # each a package of kernels/


def load_backend(device: str, dtype: str) -> ModuleType:
    """Import the kernels of `device`; RequestError if it or `dtype` is not implemented, or this machine lacks it."""
    if device not in DEVICES:
        raise RequestError(f"device is {device!r} and must be one of {', '.join(map(repr, DEVICES))}.")
    backend = importlib.import_module(f"tinygpt.kernels.{device}")
    if dtype == STORAGE_DTYPE:
        raise RequestError(
            f"dtype is {dtype!r}, in which weights are kept in files and nothing computes: run `tinygpt "
            f"convert SRC DST --dtype {dtype}` and load DST, leaving dtype at 'auto'."
        )
    if dtype not in ("auto", *backend.DTYPES):
        allowed = ", ".join(map(repr, backend.DTYPES))
        raise RequestError(f"dtype is {dtype!r} and device {device!r} computes in {allowed} only.")
    try:
        backend.check_device()
    except DeviceError as error:
        raise RequestError(f"device is {device!r} and cannot be used: {error} Or use device 'cpu'.") from None
    return backend


def check_model(backend: ModuleType, config: ModelConfig, path: Path) -> None:
    """RequestError, by name, for a model that the backend cannot run."""
    try:
        backend.check_model(config)
    except DeviceError as error:
        device = name_of(backend)
        raise RequestError(f"device is {device!r} and cannot run {path}: {error} Use device 'cpu'.") from None


def name_of(backend: ModuleType) -> str:
    """The device that a backend is for."""
    return backend.__name__.rpartition(".")[2]
