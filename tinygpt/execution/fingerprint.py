"""A number that tells one model's weights from another's."""

import zlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np


def fingerprint(params: Any) -> str:
    """The CRC-32 of all arrays of a backend's Params, as 8 hex digits."""
    checksum = 0
    for array in _arrays(params):
        checksum = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8), checksum)
    return f"{checksum:08x}"


def _arrays(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, np.ndarray):
        yield value
    elif hasattr(value, "copy_to_host"):  # an array on a GPU
        yield value.copy_to_host()
    elif isinstance(value, dict):
        yield from (array for name in sorted(value) for array in _arrays(value[name]))
    elif isinstance(value, tuple):  # named tuples too
        yield from (array for item in value for array in _arrays(item))
    elif is_dataclass(value):
        yield from (array for field in fields(value) for array in _arrays(getattr(value, field.name)))
