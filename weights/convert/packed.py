"""Converted checkpoints: packed weights in one safetensors file, which kernels read in place.

model.tinygpt.safetensors holds the CPU kernels' arrays by name, bfloat16 as two bytes. Its metadata: `format`,
`version`, `dtype`, whether the head is `tied` to wte, the packing's numbers, the `source`, the calibration, and the
`crc32` of the data. Arrays that fill whole 64 bytes come first, so that each starts on a 64-byte boundary.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ..checkpoint import read_config
from ..config import DTYPES, ModelConfig
from ..containers.safetensors import Entry, read_safetensors, write_tensors
from ..errors import CheckpointError
from ..files import PACKED_FILE, crc32_of, in_a_thread
from ..tensor import FILES, MappedFile, StoredTensor

FORMAT, VERSION = "tinygpt packed weights", "3"
BOUNDARY = 64  # bytes of the widest vector
CONVERT_AGAIN = "convert the original checkpoint again with `tinygpt convert`."
# Dtypes in the file, by the arrays'.
STORED = {"float32": "float32", "uint8": "U8", "uint16": "bfloat16", "int16": "float16"}

Layout = Mapping[str, tuple[tuple[int, ...], np.dtype]]


@dataclass(frozen=True)
class PackedCheckpoint:
    """A converted checkpoint. tied: wte is the head; checksum: of the data, computed in a thread."""

    path: Path
    config: ModelConfig
    dtype: str
    tied: bool
    metadata: Mapping[str, str]
    stored: Mapping[str, StoredTensor]
    checksum: Future[str]

    @classmethod
    def open(cls, path: Path) -> "PackedCheckpoint":
        """Open a folder with PACKED_FILE. Raise CheckpointError if it is damaged or of another version."""
        file = path / PACKED_FILE
        for name in FILES:
            if (path / name).exists():
                raise CheckpointError(
                    f"{path} holds both {PACKED_FILE} and {name}: move one to another folder."
                )
        config = read_config(path)
        try:
            packed = read_safetensors(file)
        except CheckpointError as error:
            raise CheckpointError(f"{error} If it was made on this machine, {CONVERT_AGAIN}") from None
        metadata = packed.metadata
        stored = packed.tensors
        _check_metadata(file, metadata)
        checksum = in_a_thread(lambda: crc32_of([_data(stored)]))
        return cls(path, config, metadata["dtype"], metadata["tied"] == "true", metadata, stored, checksum)

    @property
    def folder(self) -> Path:
        return self.path

    def begin_checksum(self) -> Future[str]:
        return self.checksum

    @property
    def file(self) -> MappedFile:
        return next(iter(self.stored.values())).file

    def arrays(self, layout: Layout, packing: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Return writable views of the file, whose writes stay out of it.

        Raise one CheckpointError that lists all differences from this layout and packing, or for damaged data.
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
        if self.checksum.result() != self.metadata.get("crc32"):
            raise CheckpointError(
                f"{self.path / PACKED_FILE} is damaged, its data does not have the checksum in its header: copy it "
                f"again, or {CONVERT_AGAIN}"
            )
        return {name: self.stored[name].array(dtype) for name, (_, dtype) in layout.items()}


def write_packed(folder: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, object]) -> Path:
    """Write PACKED_FILE into the folder."""
    ordered = sorted(arrays.items(), key=lambda item: (item[1].nbytes % BOUNDARY != 0, -item[1].itemsize))
    checksum = crc32_of(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for _, array in ordered)
    about = {"format": FORMAT, "version": VERSION, **metadata, "crc32": checksum}
    path = folder / PACKED_FILE
    entries = {name: Entry(STORED[a.dtype.name], a.shape, partial(np.asarray, a)) for name, a in ordered}
    write_tensors(path, entries, {name: str(value) for name, value in about.items()}, BOUNDARY)
    return path


def _check_metadata(file: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} is a safetensors file that was not made by tinygpt's convert: {CONVERT_AGAIN}"
        )
    if metadata.get("version") != VERSION:
        raise CheckpointError(
            f"{file} is in version {metadata.get('version')} of its format and this tinygpt reads version {VERSION}: "
            f"{CONVERT_AGAIN}"
        )
    if metadata.get("dtype") not in DTYPES or metadata.get("tied") not in ("true", "false"):
        raise CheckpointError(f"{file} has damaged metadata, {metadata}: {CONVERT_AGAIN}")


def _differences(stored: Mapping[str, StoredTensor], layout: Layout) -> Iterable[str]:
    yield from (f"{name} is missing" for name in layout if name not in stored)
    yield from (f"{name} is unexpected" for name in stored if name not in layout)
    for name in layout.keys() & stored.keys():
        (shape, dtype), tensor = layout[name], stored[name]
        if tensor.shape != shape or tensor.dtype != STORED[dtype.name]:
            yield f"{name} is {tensor.dtype} {tensor.shape} and should be {STORED[dtype.name]} {shape}"
        elif tensor.offset % (
            BOUNDARY if dtype.itemsize * np.prod(shape) % BOUNDARY == 0 else dtype.itemsize
        ):
            yield f"{name} does not start on its boundary"


def _data(stored: Mapping[str, StoredTensor]) -> memoryview:
    data = memoryview(next(iter(stored.values())).file.data)
    return data[min(tensor.offset for tensor in stored.values()) :]
