"""safetensors: an 8-byte header length, a JSON header, and the tensors end to end.

Format: https://huggingface.co/docs/safetensors/index#format
"""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from tinygpt.weights.containers.float8 import FORMAT as FLOAT8
from tinygpt.weights.containers.float8 import with_scales
from tinygpt.weights.containers.mapped_file import (
    Container,
    MappedFile,
    MappedTensor,
    Peek,
    contiguous_strides,
    is_possible_shape,
)
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.files import sync

MAX_HEADER = 100_000_000  # bytes, the library's bound
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


@dataclass(frozen=True)
class Entry:
    """A tensor of a safetensors file: its dtype by the format's name, and what makes its array at writing."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    array: Callable[[], np.ndarray]


def is_safetensors(peek: Peek) -> bool:
    return peek.head[8:9] == b"{" and struct.unpack("<Q", peek.head[:8])[0] <= MAX_HEADER


def read_safetensors(path: Path) -> Container:
    """Return the content of a safetensors file. Raise CheckpointError if the file is damaged.

    The safetensors library checks header and offsets. The mapping is ours, because the library copies every tensor and
    has no bfloat16 for NumPy.
    """
    file = MappedFile(path)
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}): download it again.") from error
    (header_size,) = struct.unpack_from("<Q", file.data)
    start = 8 + header_size
    header = json.loads(file.data[8:start])
    metadata = header.pop("__metadata__", None) or {}
    tensors = {name: _tensor(file, start, entry) for name, entry in header.items()}
    file.release()
    tensors = with_scales(path, tensors) if metadata.get("format") == FLOAT8 else tensors
    return Container("safetensors", tensors, metadata)


def _tensor(file: MappedFile, start: int, entry: dict[str, Any]) -> MappedTensor:
    shape = tuple(entry["shape"])
    if not is_possible_shape(shape):  # the library allows any sizes if one is 0
        raise CheckpointError(f"{file.path} holds a tensor of an impossible shape: download it again.")
    dtype: str = DTYPES.get(entry["dtype"]) or entry["dtype"]
    return MappedTensor(file, dtype, shape, contiguous_strides(shape), start + entry["data_offsets"][0])


def write_tensors(path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str], boundary: int = 8) -> None:
    """Write a safetensors file tensor by tensor and flush it. The data begins at a multiple of `boundary`."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, entry in entries.items():
        offsets = [start, start := start + entry.nbytes]
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % boundary)  # the format allows spaces after the JSON, and no gaps in the data
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in entries.values():
            file.write(np.ascontiguousarray(entry.array()).reshape(-1).view(np.uint8).data)
        file.flush()
        sync(file.fileno())
