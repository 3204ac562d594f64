"""TensorFlow's tensor bundle: PREFIX.index, a table that describes all variables, and their bytes in PREFIX.data-*.

Format: tensor_bundle.proto of TensorFlow. All has a CRC-32C: the table's are verified when it is read, a variable's
when that is first read.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tinygpt.regular_file import read_regular_text
from tinygpt.weights.containers.container import Container
from tinygpt.weights.containers.mapped_file import (
    MAX_DIMENSIONS,
    MAX_SIZE,
    MappedFile,
    VerifiedTensor,
    contiguous_strides,
    do_overlap,
)
from tinygpt.weights.containers.peek import Peek
from tinygpt.weights.containers.protobuf import Message, message, number
from tinygpt.weights.containers.read_ahead import ReadAhead
from tinygpt.weights.containers.tensorflow.crc32c import crc32c
from tinygpt.weights.containers.tensorflow.sorted_table import MAGIC, masked, read_table
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.messages import shown

INDEX = ".index"
MAX_SHARDS = 1000
# TensorFlow's numbers of dtypes, with their sizes in bytes: of those that can be read, and of the others.
DTYPES = {1: ("float32", 4), 2: ("float64", 8), 14: ("bfloat16", 2), 19: ("float16", 2)}
LARGE_ENDIAN = 1
# In the file `checkpoint`, whose folder may be another machine's.
LATEST = re.compile(r'^model_checkpoint_path: "(?:[^"\n]*/)?([\w.-]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """What the index says of a variable: TensorFlow's number of its dtype, its shape, and where it lies."""

    dtype: int = 0
    shape: tuple[int, ...] = ()
    shard: int = 0
    offset: int = 0
    size: int = 0
    checksum: int = 0
    is_whole: bool = True


@dataclass(frozen=True)
class Piece:
    """The bytes of a variable, and the checksum that they should have."""

    file: MappedFile
    name: str
    data: range
    checksum: int

    def verify(self) -> None:
        """Raises CheckpointError unless the bytes have their checksum."""
        view = memoryview(self.file.data)[self.data.start : self.data.stop]
        if masked(crc32c(view)) != self.checksum:
            raise CheckpointError(
                f"{self.file.path} is damaged, its variable {self.name} does not have the checksum in the index: "
                "download it again."
            )


def is_tf_index(peek: Peek) -> bool:
    return peek.tail.endswith(MAGIC)


def find_tf_index(folder: Path) -> Path | None:
    """The index of the latest checkpoint, where TensorFlow's file `checkpoint` names one."""
    if not (folder / "checkpoint").is_file():
        return None
    try:
        found = LATEST.search(read_regular_text(folder / "checkpoint"))
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / 'checkpoint'} cannot be read: {error}.") from error
    index = folder / f"{found[1]}{INDEX}" if found else folder
    return index if index.is_file() else None


def read_tf_bundle(path: Path) -> Container:
    """The variables of a bundle, given its index. CheckpointError when a file is damaged or not implemented."""
    try:
        num_shards, entries = _read_index(path)
    except CheckpointError:
        raise
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{path} is a damaged index of TensorFlow's: {error}. Download it again.") from error
    prefix = path.name.removesuffix(INDEX)
    tensors = {}
    for shard in range(num_shards):
        inside = {name: entry for name, entry in entries.items() if entry.shard == shard}
        file = MappedFile(path.with_name(f"{prefix}.data-{shard:05}-of-{num_shards:05}")) if inside else None
        tensors |= _tensors(file, inside)
    return Container("TensorFlow bundle", {name: tensors[name] for name in entries})


def _tensors(file: MappedFile | None, entries: dict[str, Entry]) -> dict[str, VerifiedTensor]:
    """Those of one data file."""
    pieces = [
        Piece(file, name, range(entry.offset, entry.offset + entry.size), entry.checksum)
        for name, entry in entries.items()
    ]
    for piece in pieces:
        if piece.data.stop > len(file):
            raise CheckpointError(
                f"{file.path} has {len(file)} bytes, and its variable {shown(piece.name)} reaches to byte "
                f"{piece.data.stop}: download it again."
            )
    if do_overlap(piece.data for piece in pieces):
        raise CheckpointError(f"{file.path} has variables that are laid over one another: download it again.")
    ahead = ReadAhead(pieces)
    return {
        piece.name: VerifiedTensor(
            file,
            DTYPES.get(entry.dtype, (f"TensorFlow's type {entry.dtype}", 0))[0],
            entry.shape,
            contiguous_strides(entry.shape),
            entry.offset,
            partial(ahead.verify, piece),
        )
        for piece, entry in zip(pieces, entries.values(), strict=True)
    }


def _read_index(path: Path) -> tuple[int, dict[str, Entry]]:
    """How many data files there are, and the variables by name. ValueError where the index is damaged."""
    records = read_table(memoryview(MappedFile(path).data))
    if b"" not in records:
        raise ValueError("it has no header")
    num_shards = _num_shards(path, records.pop(b""))
    entries = {str(name, "utf-8"): _entry(value) for name, value in records.items() if not name.startswith(b"\0")}
    in_pieces = [name for name, entry in entries.items() if not entry.is_whole]
    if in_pieces:
        raise CheckpointError(
            f"{path} has variables in several pieces, such as {shown(in_pieces[0])}, which is not implemented: save it "
            "again without a partitioner."
        )
    if any(entry.shard >= num_shards for entry in entries.values()):
        raise ValueError("a variable lies in a data file that there is none of")
    return num_shards, entries


def _num_shards(path: Path, header: Message) -> int:
    """BundleHeaderProto."""
    num_shards, consumer = 0, 0
    for field, value in header.fields():
        if field == 1 and isinstance(value, Message):  # SavedTensorSliceMeta, in the place of the header
            raise CheckpointError(
                f"{path} is in TensorFlow's first format, from before 2017: save it again in the second."
            )
        if field == 1:
            num_shards = number(value)
        elif field == 2 and number(value) == LARGE_ENDIAN:
            raise CheckpointError(f"{path} was saved on a big-endian machine: save it again on a little-endian one.")
        elif field == 3:
            consumer = dict(message(value).fields()).get(2, 0)
    if consumer not in (0, 1) or not 1 <= num_shards <= MAX_SHARDS:
        raise ValueError(f"{num_shards} data files, for readers of version {consumer}")
    return num_shards


def _entry(record: Message) -> Entry:
    """BundleEntryProto. What is 0 is left out."""
    entry, places = Entry(), {1: "dtype", 3: "shard", 4: "offset", 5: "size", 6: "checksum"}
    for field, value in record.fields():
        if field in places:
            entry = replace(entry, **{places[field]: number(value)})
        elif field == 2:
            entry = replace(entry, shape=_shape(message(value).fields()))
        elif field == 7:
            entry = replace(entry, is_whole=False)
    itemsize = DTYPES.get(entry.dtype, ("", None))[1]
    if entry.is_whole and itemsize is not None and math.prod(entry.shape) * itemsize != entry.size:
        raise ValueError(f"a variable of shape {entry.shape} has {entry.size} bytes")
    return entry


def _shape(fields: Iterable[tuple[int, int | Message]]) -> tuple[int, ...]:
    """TensorShapeProto: its second field is a size, each."""
    shape = tuple(dict(message(value).fields()).get(1, 0) for field, value in fields if field == 2)
    if len(shape) > MAX_DIMENSIONS or any(number(size) > MAX_SIZE for size in shape):
        raise ValueError("a variable of an impossible shape")
    return shape
