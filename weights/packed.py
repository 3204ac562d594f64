"""Converted checkpoints: packed weights in one safetensors file, laid so that kernels read them where they lie.

model.tinygpt.safetensors holds the CPU kernels' arrays by name. Its metadata says what they mean: `format` and
`version` of this file, `dtype`, whether the head is `tied` to wte (and so stored once), the packing's own numbers,
the `source`, and the `sha256` of all the data. The header is padded so that the data starts on a 64-byte boundary,
and arrays that fill whole 64 bytes come first, so that each of them starts on one too. Two-byte arrays hold bfloat16.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open

from tinygpt.config import GPT2Config
from tinygpt.errors import CheckpointError
from tinygpt.weights.checkpoint import Checkpoint, read_config
from tinygpt.weights.mapped_file import StoredTensor
from tinygpt.weights.resolve import resolve
from tinygpt.weights.safetensors_file import read_safetensors
from tinygpt.weights.weight_files import FORMATS

PACKED_FILE = "model.tinygpt.safetensors"
FORMAT, VERSION = "tinygpt packed weights", "1"
BOUNDARY = 64  # bytes: the widest vector, and a cache line
CONVERT_AGAIN = "convert the original checkpoint again with `python -m tinygpt convert`."
DTYPES = ("float32", "bfloat16", "int8", "int4")
# NumPy's dtypes by their names in the file, and by those that `read_safetensors` has for them.
NAMES = {"float32": "F32", "uint8": "U8", "uint16": "BF16"}
STORED = {"float32": "float32", "uint8": "U8", "uint16": "bfloat16"}

Layout = Mapping[str, tuple[tuple[int, ...], np.dtype]]


@dataclass(frozen=True)
class PackedCheckpoint:
    """A converted checkpoint: `dtype` is the one that it was converted to, `tied` says that wte is the head."""

    path: Path
    config: GPT2Config
    dtype: str
    tied: bool
    metadata: dict[str, str]
    stored: dict[str, StoredTensor]

    @classmethod
    def open(cls, path: Path) -> "PackedCheckpoint":
        """Open a folder that holds PACKED_FILE. Raises CheckpointError when that is damaged, or not of this version."""
        file = path / PACKED_FILE
        for form in FORMATS:
            if (path / form.whole).exists():
                raise CheckpointError(f"{path} holds both {PACKED_FILE} and {form.whole}: move one to another folder.")
        config = read_config(path)
        try:
            stored = read_safetensors(file)
        except CheckpointError as error:
            raise CheckpointError(f"{error} If it was made on this machine, {CONVERT_AGAIN}") from None
        metadata = _read_metadata(file)
        return cls(path, config, metadata["dtype"], metadata["tied"] == "true", metadata, stored)

    def arrays(self, layout: Layout, packing: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Views of the file, mapped into memory: writable, though what is written stays out of the file.

        Raises one CheckpointError that lists all in which the file is not of this layout and packing.
        """
        wanted = {**packing, "vocab_size": self.config.vocab_size}  # no array is as long: panels are padded
        problems = [
            f"its {name} is {self.metadata.get(name)} and {number} is asked for"
            for name, number in wanted.items()
            if self.metadata.get(name) != str(number)
        ]
        problems += _differences(self.stored, layout)
        if problems:
            lines = "\n".join(f"  {problem}" for problem in problems)
            raise CheckpointError(
                f"{self.path / PACKED_FILE} does not hold what its config.json and this tinygpt ask for:\n{lines}\n"
                f"Restore the two files as they were made together, or {CONVERT_AGAIN}"
            )
        return {name: _view(self.stored[name], *layout[name]) for name in layout}


def open_checkpoint(model: str | os.PathLike[str]) -> Checkpoint | PackedCheckpoint:
    """Open "demo", a local folder, converted or not, or a Hub id. Raises CheckpointError as their `open` does."""
    path = resolve(model)
    return PackedCheckpoint.open(path) if (path / PACKED_FILE).exists() else Checkpoint.open(path)


def write_packed(folder: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, object]) -> Path:
    """Write PACKED_FILE into the folder and read it back. CheckpointError where the disk did not keep the data."""
    ordered = sorted(arrays.items(), key=lambda item: (item[1].nbytes % BOUNDARY != 0, -item[1].itemsize))
    digest = _digest(array for _, array in ordered)
    about = {"format": FORMAT, "version": VERSION, **metadata, "sha256": digest}
    path = folder / PACKED_FILE
    with path.open("wb") as file:
        file.write(_header(ordered, {name: str(value) for name, value in about.items()}))
        for _, array in ordered:
            file.write(_bytes(array))
        file.flush()
        os.fsync(file.fileno())
    stored = read_safetensors(path)
    if _digest(_view(stored[name], array.shape, array.dtype) for name, array in ordered) != digest:
        raise CheckpointError(f"{path} does not read as it was written: the disk is failing, take another one.")
    return path


def _header(ordered: Iterable[tuple[str, np.ndarray]], metadata: dict[str, str]) -> bytes:
    entries, start = {"__metadata__": metadata}, 0
    for name, array in ordered:
        offsets = [start, start := start + array.nbytes]
        entries[name] = {"dtype": NAMES[array.dtype.name], "shape": array.shape, "data_offsets": offsets}
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % BOUNDARY)  # the format allows spaces after the JSON, and no gaps in the data
    return struct.pack("<Q", len(text)) + text


def _read_metadata(file: Path) -> dict[str, str]:
    with safe_open(file, framework="numpy") as opened:
        metadata = opened.metadata() or {}
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{file} is a safetensors file that was not made by tinygpt's convert: {CONVERT_AGAIN}")
    if metadata.get("version") != VERSION:
        raise CheckpointError(
            f"{file} is in version {metadata.get('version')} of its format and this tinygpt reads version {VERSION}: "
            f"{CONVERT_AGAIN}"
        )
    if metadata.get("dtype") not in DTYPES or metadata.get("tied") not in ("true", "false"):
        raise CheckpointError(f"{file} has damaged metadata, {metadata}: {CONVERT_AGAIN}")
    return metadata


def _differences(stored: dict[str, StoredTensor], layout: Layout) -> Iterable[str]:
    yield from (f"{name} is missing" for name in layout if name not in stored)
    yield from (f"{name} is unexpected" for name in stored if name not in layout)
    for name in layout.keys() & stored.keys():
        (shape, dtype), tensor = layout[name], stored[name]
        if tensor.shape != shape or tensor.dtype != STORED[dtype.name]:
            yield f"{name} is {tensor.dtype} {tensor.shape} and should be {STORED[dtype.name]} {shape}"
        elif tensor.offset % (BOUNDARY if dtype.itemsize * np.prod(shape) % BOUNDARY == 0 else dtype.itemsize):
            yield f"{name} does not start on its boundary"


def _view(tensor: StoredTensor, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.ndarray(shape, dtype, tensor.file.data, tensor.offset)


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _digest(arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(_bytes(array))
    return digest.hexdigest()
