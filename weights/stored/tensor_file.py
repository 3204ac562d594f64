"""Writing safetensors files tensor by tensor, in dtypes that NumPy has no name for."""

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinygpt.disk import sync


@dataclass(frozen=True)
class Entry:
    """A tensor to write: its dtype by the format's name, its size in bytes, and what makes its array when it is due."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    array: Callable[[], np.ndarray]


def write_tensors(path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str], boundary: int = 8) -> None:
    """Write the file, and have it on the disk. The data begins at a multiple of `boundary`."""
    with path.open("wb") as file:
        file.write(header(((name, e.dtype, e.shape, e.nbytes) for name, e in entries.items()), metadata, boundary))
        for entry in entries.values():
            file.write(np.ascontiguousarray(entry.array()).reshape(-1).view(np.uint8).data)
        file.flush()
        sync(file.fileno())


def header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str], boundary: int
) -> bytes:
    """Of (name, dtype, shape, bytes) each. The format allows spaces behind the JSON, and no gaps in the data."""
    entries, start = {"__metadata__": dict(metadata)}, 0
    for name, dtype, shape, size in tensors:
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start := start + size]}
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % boundary)
    return struct.pack("<Q", len(text)) + text
