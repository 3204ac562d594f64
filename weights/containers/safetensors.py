"""safetensors: an 8-byte header length, a JSON header, and the tensors end to end.

Format: https://huggingface.co/docs/safetensors/index#format.
"""

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from ..files import sync
from ..tensor import (
    Container,
    MappedFile,
    StoredTensor,
    contiguous_strides,
    is_possible_shape,
    parsing,
)

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
# The format's name, and bytes of an element.
WRITTEN = {
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "U8": ("U8", 1),
}


@dataclass(frozen=True)
class Entry:
    """A tensor to write: its dtype in WRITTEN, and a function that returns its array."""

    dtype: str
    shape: tuple[int, ...]
    array: Callable[[], np.ndarray]


def read_safetensors(path: Path) -> Container:
    """Raise CheckpointError for a damaged file."""
    file = MappedFile(path)
    # The library checks header and offsets. It copies tensors and has no bfloat16 for NumPy, so that they are mapped.
    with parsing(path, "safetensors file", SafetensorError), safe_open(path, framework="numpy"):
        pass
    (header_size,) = struct.unpack_from("<Q", file.data)
    start = 8 + header_size
    header = json.loads(file.data[8:start])
    metadata = header.pop("__metadata__", None) or {}
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        shape = tuple(entry["shape"])
        dtype = entry["dtype"]
        if not is_possible_shape(shape):  # the library allows any sizes if one is 0
            raise CheckpointError(f"{path} holds a tensor of an impossible shape: download it again.")
        offset = start + entry["data_offsets"][0]
        tensors[name] = StoredTensor(file, DTYPES.get(dtype, dtype), shape, contiguous_strides(shape), offset)
    file.release()
    return Container("safetensors", tensors, metadata)


def write_tensors(
    path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str], boundary: int = 8
) -> None:
    """Write a safetensors file, tensor by tensor, and flush it. The data begins at a multiple of `boundary`."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, entry in entries.items():
        dtype, itemsize = WRITTEN[entry.dtype]
        offsets = [start, start := start + itemsize * math.prod(entry.shape)]
        header[name] = {"dtype": dtype, "shape": entry.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % boundary)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in entries.values():
            file.write(np.ascontiguousarray(entry.array()).reshape(-1).view(np.uint8).data)
        file.flush()
        sync(file.fileno())
