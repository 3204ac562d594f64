"""safetensors: an 8-byte header length, a JSON header, and the tensors end to end.

Format: https://huggingface.co/docs/safetensors/index#format. float8 is e4m3fn: sign, 4 bits of exponent, 3 of mantissa,
no infinity, a NaN per sign (Micikevicius et al., "FP8 Formats for Deep Learning", 2022). A tensor `x` has float32
scales `x_scale`, of a shape that multiplies it.
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

FORMAT = "tinygpt float8"  # of a safetensors file, by its metadata
NAME = "float8"
IN_FILES = "F8_E4M3"
SCALE = "_scale"
LARGEST = 448.0
# Values by byte: 8 subnormal, then 8 for each exponent.
_BYTES = np.arange(128)
_EXPONENTS = np.maximum(_BYTES >> 3, 1)
_MANTISSAS = (_BYTES & 7) + 8 * (_BYTES >> 3 > 0)
_POSITIVE = np.ldexp(_MANTISSAS / 8, _EXPONENTS - 7)
_POSITIVE[127] = np.nan
VALUES = np.concatenate([_POSITIVE, -_POSITIVE]).astype(np.float32)
_BETWEEN = (_POSITIVE[:126] + _POSITIVE[1:127]) / 2  # neighbors' means: each is a float32


def encode(x: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes of x, rounded to even, and float32 scales along `axis`: NaN of a channel that is not finite."""
    largest = np.abs(x).max(axis=axis, keepdims=True)
    scales = np.where(largest > 0, largest / np.float32(LARGEST), 1).astype(np.float32)
    scales[~np.isfinite(scales)] = np.nan
    sizes = np.minimum(np.abs(x) / scales, np.float32(LARGEST))
    codes = np.searchsorted(_BETWEEN, sizes)
    is_tie = sizes == _BETWEEN[np.minimum(codes, _BETWEEN.size - 1)]
    codes += is_tie & (codes % 2 == 1)
    codes[np.isnan(sizes)] = 127
    return (codes + 128 * np.signbit(x)).astype(np.uint8), scales


@dataclass(frozen=True, slots=True)
class Float8Tensor(StoredTensor):
    scales: StoredTensor
    is_floating = property(lambda self: True)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) + self.scales.nbytes

    def float32(self) -> np.ndarray:
        return VALUES[self.array("u1")] * self.scales.float32()


def with_scales(path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return each float8 tensor with its scales. Raise CheckpointError if they are absent or do not fit."""
    scaled = {name for name, tensor in tensors.items() if tensor.dtype == IN_FILES}
    joined = {
        name: tensor for name, tensor in tensors.items() if name.removesuffix(SCALE) not in scaled - {name}
    }
    for name in scaled:
        codes = tensors[name]
        scales = tensors.get(name + SCALE)
        fits = scales is not None and scales.dtype == "float32" and len(scales.shape) == len(codes.shape)
        if not fits or not all(n in (1, size) for n, size in zip(scales.shape, codes.shape, strict=True)):
            raise CheckpointError(
                f"{path} holds {name} as float8 without its scales: convert the checkpoint again."
            )
        joined[name] = Float8Tensor(codes.file, NAME, codes.shape, codes.strides, codes.offset, scales)
    return joined


DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
# The format's name, and bytes of an element.
WRITTEN = {
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "U8": ("U8", 1),
    NAME: (IN_FILES, 1),
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
    tensors = with_scales(path, tensors) if metadata.get("format") == FORMAT else tensors
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
