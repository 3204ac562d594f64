"""safetensors: an 8-byte header length, a JSON header, and the tensors end to end.

Format: https://huggingface.co/docs/safetensors/index#format
"""

import json
import struct
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError, safe_open

from tinygpt.regular_file import name_of_open_file
from tinygpt.weights.containers.container import Container
from tinygpt.weights.containers.mapped_file import (
    MAX_DIMENSIONS,
    MAX_SIZE,
    MappedFile,
    MappedTensor,
    contiguous_strides,
)
from tinygpt.weights.containers.peek import Peek
from tinygpt.weights.containers.safetensors.float8 import FORMAT as FLOAT8
from tinygpt.weights.containers.safetensors.float8 import with_scales
from tinygpt.weights.errors import CheckpointError

MAX_HEADER = 100_000_000  # bytes, as the library has it
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


def is_safetensors(peek: Peek) -> bool:
    return peek.head[8:9] == b"{" and struct.unpack("<Q", peek.head[:8])[0] <= MAX_HEADER


def read_safetensors(path: Path) -> Container:
    """What a safetensors file holds. Raises CheckpointError when the file is damaged.

    The safetensors library checks the file, header and offsets included. The mapping is ours, because the library
    copies every tensor that it hands out and has no bfloat16 for NumPy.
    """
    file = MappedFile(path, check=lambda opened: _check(path, opened))
    (header_size,) = struct.unpack_from("<Q", file.data)
    start = 8 + header_size
    header = json.loads(file.data[8:start])
    metadata = header.pop("__metadata__", None) or {}
    tensors = {name: _tensor(file, start, entry) for name, entry in header.items()}
    tensors = with_scales(path, tensors) if metadata.get("format") == FLOAT8 else tensors
    return Container("safetensors", tensors, metadata)


def _check(path: Path, opened: BinaryIO) -> None:
    try:
        with safe_open(name_of_open_file(opened), framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}): download it again.") from error


def _tensor(file: MappedFile, start: int, entry: dict) -> MappedTensor:
    shape = tuple(entry["shape"])
    if len(shape) > MAX_DIMENSIONS or any(size > MAX_SIZE for size in shape):  # the library allows any if one is 0
        raise CheckpointError(f"{file.path} holds a tensor of an impossible shape: download it again.")
    dtype = DTYPES.get(entry["dtype"], entry["dtype"])
    return MappedTensor(file, dtype, shape, contiguous_strides(shape), start + entry["data_offsets"][0])
