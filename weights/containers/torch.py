"""Files of torch.save, read without torch: a state dict, or a training checkpoint that holds much more.

Since torch 1.6 the file is an uncompressed zip archive of `data.pkl` (the structure) and one `data/<key>` per storage.
Before, it was five pickles (a magic number, a version, facts about the machine, the structure, the storages' keys) and
then, for each key, a count of elements and the elements.
"""

import io
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from tinygpt.weights.containers.mapped_file import (
    ITEMSIZE,
    Container,
    MappedFile,
    MappedTensor,
    Peek,
    ReadAhead,
    VerifiedTensor,
    do_overlap,
    element_extent,
)
from tinygpt.weights.containers.torch_pickle import Storage, StridedView, Stub, fields_of, load_pickle
from tinygpt.weights.errors import CheckpointError, listed, shown

ZIP, PICKLE = b"PK\x03\x04", b"\x80\x02"  # the first bytes of both forms
LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip entry: signature, lengths of its name and its extra field
MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
ITEM_BYTES = {**ITEMSIZE, "uint8": 1, "bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8}
MAX_DEPTH, MAX_VISITS = 8, 1_000_000  # of dictionaries in dictionaries
# Tensors may share a storage, as the layers of some models do. Memory stays in proportion to the file.
MAX_SHARING = 100
# Names of functions and classes that make tensors of other kinds: quantized, sparse or NumPy's.
UNREADABLE = re.compile("rebuild|reconstruct|Tensor|Param")
MAX_KIND = 100  # characters of such a name that are looked at: one name may stand for any number of tensors


@dataclass(frozen=True)
class Entry:
    """The bytes of a storage in the file, and their CRC-32 if the archive has one."""

    file: MappedFile
    name: str
    data: range
    crc32: int | None = None

    def read(self) -> bytes:
        self.verify()
        return self.file.data[self.data.start : self.data.stop]

    def verify(self) -> None:
        view = memoryview(self.file.data)[self.data.start : self.data.stop]
        if self.crc32 is not None and zlib.crc32(view) != self.crc32:
            raise CheckpointError(
                f"{self.file.path} is damaged, its entry {self.name!r} does not have the checksum in the archive's "
                "directory: download it again."
            )


def is_torch(peek: Peek) -> bool:
    """Every legacy file begins with the pickle of MAGIC_NUMBER, in one of protocol 2's spellings."""
    return peek.head.startswith((ZIP, PICKLE))


def read_torch(path: Path) -> Container:
    """Return the tensors of a state dict. Raise CheckpointError if the file is damaged, hostile or holds more."""
    file, format, structure, storages = _open(path, has_stubs=False)
    if not isinstance(structure, dict):
        raise CheckpointError(f"{path} holds a {type(structure).__name__} and must hold a state dict.")
    others = [str(k) for k, v in structure.items() if not isinstance(k, str) or not isinstance(v, StridedView)]
    if others:
        raise CheckpointError(
            f"{path} must hold a state dict (tensors by name) and holds something else under: {listed(others)}. Save "
            "the model's state dict alone, or call save_pretrained."
        )
    return _container(file, format, structure, {}, storages)


def read_training_checkpoint(path: Path, part: range | None = None) -> Container:
    """Return the tensors of nested dictionaries, their keys joined by dots; metadata is the top level, with Stubs.

    part: of MappedFile. Raises CheckpointError if the file is damaged.
    """
    file, format, structure, storages = _open(path, has_stubs=True, part=part)
    if not isinstance(structure, dict):
        raise CheckpointError(f"{path} holds a {type(structure).__name__} and must hold a state dict.")
    found: dict[str, StridedView | Stub] = {}
    length = 0  # of all names: what stands once in the file may be part of many
    for name, value in _flat(structure, (), count()):
        if name in found:
            raise CheckpointError(f"{path} holds two tensors {shown(name)}: save it again.")
        found[name] = value
        length += len(name)
        if length > len(file):
            raise CheckpointError(f"{path} has {len(file)} bytes and names of more: it is hostile.")
    views = {name: value for name, value in found.items() if isinstance(value, StridedView)}
    container = _container(file, format, views, fields_of(structure), storages)
    unreadable = {
        name: MappedTensor(file, stub.name[-MAX_KIND:], (), (), 0)
        for name, stub in found.items()
        if isinstance(stub, Stub)
    }
    return replace(container, tensors={**container.tensors, **unreadable})


def _open(path: Path, has_stubs: bool, part: range | None = None) -> tuple[MappedFile, str, Any, dict[str, Entry]]:
    file = MappedFile(path, part)
    is_zip = file.data[file.begin : file.begin + 4] == ZIP
    structure, storages = (_read_zip if is_zip else _read_legacy)(file, has_stubs)
    file.release()
    return file, "torch zip" if is_zip else "torch legacy", structure, storages


def _flat(structure: dict, path: tuple[str, ...], visits: Iterator[int]) -> Iterator[tuple[str, StridedView | Stub]]:
    """Yield the tensors in nested dictionaries, and Stubs of unreadable ones. A pickle may contain itself."""
    for key, value in structure.items():
        if next(visits) > MAX_VISITS:
            raise CheckpointError("a torch file holds dictionaries in dictionaries without end: it is hostile.")
        name = (*path, str(key))
        is_unreadable = isinstance(value, Stub) and UNREADABLE.search(value.name[-MAX_KIND:].rpartition(".")[2])
        if isinstance(value, StridedView) or is_unreadable:
            yield ".".join(name), value
        elif isinstance(value, dict) and len(name) < MAX_DEPTH:
            yield from _flat(value, name, visits)


def _container(
    file: MappedFile, format: str, views: dict[str, StridedView], metadata: dict, storages: dict[str, Entry]
) -> Container:
    ahead = ReadAhead(storages.values())
    tensors = {name: _tensor(file, name, view, storages, ahead) for name, view in views.items()}
    total = sum(tensor.nbytes for tensor in tensors.values())
    if total > MAX_SHARING * len(file):
        raise CheckpointError(
            f"{file.path} has {len(file)} bytes and its tensors claim {total}, sharing their storages beyond reason: "
            "save it again without views that repeat elements."
        )
    return Container(format, tensors, metadata)


def _tensor(
    file: MappedFile, name: str, view: StridedView, storages: dict[str, Entry], ahead: ReadAhead
) -> VerifiedTensor:
    found = storages.get(view.storage.key, Entry(file, "", range(0)))
    itemsize = ITEM_BYTES.get(view.storage.dtype, 1)
    end = (view.offset + element_extent(view.shape, view.strides)) * itemsize
    # A stride of 0 repeats elements: the result must not be larger than a file that could hold it.
    if end > len(found.data) or math.prod(view.shape) * itemsize > len(file):
        raise CheckpointError(
            f"{file.path} holds {len(found.data)} bytes for the storage of {name}, which reaches to byte {end}: "
            "the file is truncated or damaged, download it again."
        )
    offset = found.data.start + view.offset * itemsize
    verify = partial(ahead.verify, found) if found.crc32 is not None else found.verify
    return VerifiedTensor(file, view.storage.dtype, view.shape, view.strides, offset, verify)


def _read_zip(file: MappedFile, has_stubs: bool) -> tuple[Any, dict[str, Entry]]:
    entries = _zip_entries(file)
    if "data.pkl" not in entries:
        raise CheckpointError(f"{file.path} is a zip archive without data.pkl: no torch.save wrote it.")
    if "byteorder" in entries and entries["byteorder"].read() != b"little":
        raise CheckpointError(f"{file.path} was saved on a big-endian machine: convert it to safetensors.")
    storages = {name.removeprefix("data/"): entry for name, entry in entries.items() if name.startswith("data/")}
    return load_pickle(io.BytesIO(entries["data.pkl"].read()), file.path, has_stubs)[0], storages


def _zip_entries(file: MappedFile) -> dict[str, Entry]:
    """Return the entries by their names without the folder that all lie in.

    Raise CheckpointError for a damaged archive, and for entries that are not stored as they are in separate bytes.
    """
    try:
        with zipfile.ZipFile(_ZipView(file.data)) as archive:
            entries = archive.infolist()
        names = [info.filename.partition("/")[2] for info in entries]
        is_plain = all(
            info.compress_type == zipfile.ZIP_STORED
            and info.compress_size == info.file_size
            and not info.flag_bits & 1  # encrypted
            for info in entries
        )
        ranges = [_data_range(file, info) for info in entries] if is_plain else []
    except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError, ValueError, struct.error) as error:
        raise CheckpointError(f"{file.path} is a damaged zip archive ({error}): download it again.") from error
    if not is_plain or len(set(names)) < len(names) or do_overlap(ranges):
        raise CheckpointError(
            f"{file.path} is a zip archive with entries that are compressed, encrypted, repeated or laid over one "
            "another, as torch.save never writes them: save it again with torch.save or as safetensors."
        )
    has_checksums = any(info.CRC for info in entries)  # torch.serialization.set_crc32_options(False) writes 0 for all
    return {
        name: Entry(file, info.filename, data, info.CRC if has_checksums else None)
        for name, info, data in zip(names, entries, ranges, strict=True)
    }


class _ZipView:
    """A mapping as zipfile takes a file; mmap has `seekable` from Python 3.13 on."""

    def __init__(self, data: Any):
        self.read, self.seek, self.tell = data.read, data.seek, data.tell
        data.seek(0)

    def seekable(self) -> bool:
        return True


def _data_range(file: MappedFile, info: zipfile.ZipInfo) -> range:
    start = info.header_offset + LOCAL_HEADER.size
    if not LOCAL_HEADER.size <= start <= len(file):
        raise zipfile.BadZipFile(f"the entry {info.filename!r} begins outside the file")
    signature, name_size, extra_size = LOCAL_HEADER.unpack_from(file.data, info.header_offset)
    start += name_size + extra_size
    if signature != ZIP or start + info.file_size > len(file):
        raise zipfile.BadZipFile(f"the entry {info.filename!r} reaches beyond the file")
    return range(start, start + info.file_size)


def _read_legacy(file: MappedFile, has_stubs: bool) -> tuple[Any, dict[str, Entry]]:
    """Return the structure and the place of each storage."""
    file.data.seek(file.begin)
    is_known = file.data[file.begin : file.begin + 2] == PICKLE
    if not is_known or [load_pickle(file.data, file.path, has_stubs)[0] for _ in range(2)] != [
        MAGIC_NUMBER,
        PROTOCOL_VERSION,
    ]:
        raise CheckpointError(
            f"{file.path} does not begin as torch.save's files do: download it again, or convert it to safetensors."
        )
    machine, _ = load_pickle(file.data, file.path, has_stubs)
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise CheckpointError(f"{file.path} was saved on a big-endian machine: convert it to safetensors.")
    structure, named = load_pickle(file.data, file.path, has_stubs)
    keys, _ = load_pickle(file.data, file.path, has_stubs)
    return structure, _legacy_storages(file, named, keys)


def _legacy_storages(file: MappedFile, named: dict[str, Storage], keys: Any) -> dict[str, Entry]:
    unknown = sorted({storage.dtype for storage in named.values()} - set(ITEM_BYTES))
    if unknown:  # their length is not known, nor the begin of the next ones
        raise CheckpointError(f"{file.path} holds {listed(unknown)}, which are not implemented: save it without them.")
    if not isinstance(keys, list) or any(type(key) is not str or key not in named for key in keys):
        raise CheckpointError(f"{file.path} lists storages that no tensor uses: download it again.")
    storages, position = {}, file.data.tell()
    for key in keys:
        start = position + 8
        size = int.from_bytes(file.data[position:start], "little") * ITEM_BYTES[named[key].dtype]
        storages[key] = Entry(file, key, range(start, min(start + size, len(file))))
        position = start + size
    return storages
