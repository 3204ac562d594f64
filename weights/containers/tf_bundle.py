"""TensorFlow's tensor bundle: PREFIX.index, a table of all variables, and their bytes in PREFIX.data-*.

Formats: TensorFlow's tensor_bundle.proto, in a table of LevelDB's form
(https://github.com/google/leveldb/blob/main/doc/table_format.md). All parts have a CRC-32C.
"""

import math
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, how_to_install, shown
from ..files import read_regular_text
from ..tensor import (
    ITEMSIZE,
    ArchiveMember,
    Container,
    MappedFile,
    StoredTensor,
    check_places,
    contiguous_strides,
    is_possible_shape,
    parsing,
)
from .formats import TF_TABLE

INDEX = ".index"
MAX_SHARDS = 1000
DTYPES = {1: "float32", 2: "float64", 14: "bfloat16", 19: "float16"}  # by TensorFlow's numbers
BIG_ENDIAN = 1
# In the file `checkpoint`; the folder may be another machine's.
LATEST = re.compile(r'^model_checkpoint_path: "(?:[^"\n]*/)?([\w.-]+)"', re.MULTILINE)
FOOTER = 48  # bytes, TF_TABLE included
TRAILER = 5  # bytes after a block: its compression, and its checksum
MAX_KEY = 1000  # bytes: a key repeats the beginning of the one before
MAX_KEYS = 20  # times the table's bytes, by all keys
# wire types of protobuf
VARINT = 0
FIXED64 = 1
BYTES = 2
FIXED32 = 5


def find_tf_index(folder: Path) -> Path | None:
    """Return the index of the latest checkpoint, if TensorFlow's file `checkpoint` names one."""
    if not (folder / "checkpoint").is_file():
        return None
    with parsing(folder / "checkpoint", "text"):
        prefix = LATEST.search(read_regular_text(folder / "checkpoint"))
    index = folder / f"{prefix[1]}{INDEX}" if prefix else folder
    return index if index.is_file() else None


def read_tf_bundle(path: Path) -> Container:
    """Return the variables of a bundle, given its index. Raise CheckpointError if a file is damaged or too new."""
    if find_spec("google_crc32c") is None:
        raise CheckpointError(
            f"{path} is TensorFlow's, whose checksums need google-crc32c: {how_to_install('tf')}."
        )
    with parsing(path, "index of TensorFlow's"):
        variables = _read_index(path)
    places: dict[MappedFile, list[range]] = {}
    tensors: dict[str, StoredTensor] = {}
    for part, dtype, shape in variables:
        places.setdefault(part.file, []).append(part.data)
        strides = contiguous_strides(shape)
        start = part.data.start
        tensors[part.name] = StoredTensor(part.file, dtype, shape, strides, start, verify=cache(part.verify))
    for file, inside in places.items():
        with parsing(file.path, "data file of TensorFlow's"):
            check_places(inside, len(file))
    return Container("TensorFlow bundle", tensors)


def _read_index(path: Path) -> list[tuple[ArchiveMember, str, tuple[int, ...]]]:
    records = _read_table(MappedFile(path).data[:])
    if b"" not in records:
        raise ValueError("it has no header")
    num_shards = _num_shards(path, records.pop(b""))
    prefix = path.name.removesuffix(INDEX)
    files = {}
    variables = []
    for key, record in records.items():
        if key.startswith(b"\0"):
            continue
        name = str(key, "utf-8")
        entry = dict(_fields(record))
        if 7 in entry:
            raise CheckpointError(
                f"{path} has variables in several pieces, such as {shown(name)}, which is not implemented: save it "
                "again without a partitioner."
            )
        numbers = [entry.get(field, 0) for field in (1, 3, 4, 5, 6)]
        if not all(isinstance(number, int) for number in numbers):
            raise ValueError("a message stands where a number belongs")
        kind, shard, offset, size, checksum = numbers
        if shard >= num_shards:
            raise ValueError("a variable lies in a data file that there is none of")
        if shard not in files:
            files[shard] = MappedFile(path.with_name(f"{prefix}.data-{shard:05}-of-{num_shards:05}"))
        dtype = DTYPES.get(kind, f"TensorFlow's type {kind}")
        shape = _shape(entry.get(2, b""))
        if kind in DTYPES and math.prod(shape) * ITEMSIZE[dtype] != size:
            raise ValueError(f"a variable of shape {shape} has {size} bytes")
        part = ArchiveMember(files[shard], name, range(offset, offset + size), checksum, masked_crc32c)
        variables.append((part, dtype, shape))
    return variables


def _num_shards(path: Path, header: bytes) -> int:
    fields = dict(_fields(header))
    num_shards = fields.get(1, 0)
    if not isinstance(num_shards, int):  # SavedTensorSliceMeta, in the place of the header
        raise CheckpointError(
            f"{path} is in TensorFlow's first format, from before 2017: save it again in the second."
        )
    if fields.get(2) == BIG_ENDIAN:
        raise CheckpointError(
            f"{path} was saved on a big-endian machine: save it again on a little-endian one."
        )
    consumer = dict(_fields(fields.get(3, b""))).get(2, 0)
    if consumer not in (0, 1) or not 1 <= num_shards <= MAX_SHARDS:
        raise ValueError(f"{num_shards} data files, for readers of version {consumer}")
    return num_shards


def _shape(message: Any) -> tuple[int, ...]:
    """Read a TensorShapeProto's repeated second field."""
    shape = tuple(dict(_fields(value)).get(1, 0) for field, value in _fields(message) if field == 2)
    if not is_possible_shape(shape):
        raise ValueError("a variable of an impossible shape")
    return shape


def masked_crc32c(data: Any) -> int:
    """Return a checksum as files hold it: masked, because data may hold checksums."""
    import google_crc32c

    checksum = google_crc32c.value(data)
    return ((checksum >> 15 | checksum << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF


def _read_table(data: bytes) -> dict[bytes, bytes]:
    if len(data) < FOOTER or not data.endswith(TF_TABLE):
        raise ValueError("it does not end as such a table does")
    # Place and size of the block of statistics, which is empty, and of the index.
    _, _, start, size, _ = _varints(data, 4, len(data) - FOOTER, len(data))
    records: dict[bytes, bytes] = {}
    end = length = 0
    for _, handle in _records_of(data, start, size):
        start, size, _ = _varints(handle, 2, 0, len(handle))
        if start < end:
            raise ValueError("its blocks are laid over one another")
        end = start + size
        for key, value in _records_of(data, start, size):
            length += len(key)
            if length > MAX_KEYS * len(data):
                raise ValueError(f"it has {len(data)} bytes and keys of more than {MAX_KEYS} times as many")
            if key in records:
                raise ValueError(f"two records {key!r}")
            records[key] = value
    return records


def _records_of(data: bytes, start: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield one block's records. Each key begins with some bytes of the one before it."""
    stop = start + size
    if size < 4 or stop + TRAILER > len(data):
        raise ValueError("a block reaches outside the file")
    if masked_crc32c(data[start : stop + 1]) != int.from_bytes(data[stop + 1 : stop + TRAILER], "little"):
        raise ValueError("a block does not have its checksum")
    if data[stop]:
        raise ValueError("it is compressed, which is not implemented")
    stop -= 4 + 4 * int.from_bytes(data[stop - 4 : stop], "little")
    key = b""
    while start < stop:
        # Of the key before, this key and the value.
        shared, rest, length, start = _varints(data, 3, start, stop)
        if shared > len(key) or shared + rest > MAX_KEY or rest + length > stop - start:
            raise ValueError("a record reaches outside its block, or has too long a key")
        key = key[:shared] + data[start : start + rest]
        start += rest
        yield key, data[start : start + length]
        start += length


def _fields(message: Any) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a protobuf message. Raise ValueError if it is damaged.

    Format: https://protobuf.dev/programming-guides/encoding
    """
    if isinstance(message, int):
        raise ValueError("a number stands where a message belongs")
    place, stop = 0, len(message)
    while place < stop:
        key, place = _varints(message, 1, place, stop)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, place = _varints(message, 1, place, stop)
        else:
            size = {FIXED64: 8, FIXED32: 4}.get(wire, -1)
            if wire == BYTES:
                size, place = _varints(message, 1, place, stop)
            if not 0 <= size <= stop - place:
                raise ValueError(f"field {number} of wire type {wire} has no end")
            content = message[place : place + size]
            value = content if wire == BYTES else int.from_bytes(content, "little")
            place += size
        yield number, value


def _varints(data: bytes, count: int, place: int, stop: int) -> tuple[int, ...]:
    """Return `count` numbers, 7 bits a byte, the low ones first, and their end. Raise ValueError beyond `stop`."""
    numbers = []
    for _ in range(count):
        number = shift = 0
        byte = 0x80
        while byte & 0x80:
            if place >= stop or shift > 63:
                raise ValueError("a number has no end")
            byte, place = data[place], place + 1
            number |= (byte & 0x7F) << shift
            shift += 7
        numbers.append(number)
    return *numbers, place
