"""Files of torch.save, read without torch: a state dict, or a training checkpoint that holds much more.

Since torch 1.6: an uncompressed zip archive of `data.pkl`, the structure, and `data/<key>` for each storage. Before:
five pickles (magic number, version, machine, structure, keys), then for each key a count of elements and the elements.
"""

import io
import math
import re
import struct
import zipfile
from collections.abc import Iterator
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, cast

from ..errors import CheckpointError, listed, shown
from .mapped_file import (
    ITEMSIZE,
    ArchiveMember,
    Container,
    MappedFile,
    Peek,
    StoredTensor,
    check_places,
    element_extent,
    parsing,
)
from .torch_pickle import StridedView, Stub, fields_of, load_pickle

ZIP, PICKLE = b"PK\x03\x04", b"\x80\x02"  # the first bytes of both forms
LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip entry: signature, lengths of name and extra field
MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
ITEM_BYTES = {**ITEMSIZE, "uint8": 1, "bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8}
MAX_DEPTH, MAX_VISITS = 8, 1_000_000  # of dictionaries in dictionaries
MAX_SHARING = 100  # of a file's bytes, by all tensors: the layers of some models share a storage
# Names of functions and classes that make other tensors: quantized, sparse or NumPy's.
UNREADABLE = re.compile("rebuild|reconstruct|Tensor|Param")
ENCRYPTED = 1  # a flag of a zip entry


def is_torch(peek: Peek) -> bool:
    return peek.head.startswith((ZIP, PICKLE))


def read_torch(path: Path) -> Container:
    """Return the tensors of a state dict. Raise CheckpointError if the file is damaged, hostile or holds more."""
    file, format, structure, storages = _open(path, has_stubs=False)
    others = [
        str(k) for k, v in structure.items() if not isinstance(k, str) or not isinstance(v, StridedView)
    ]
    if others:
        raise CheckpointError(
            f"{path} must hold a state dict (tensors by name) and holds something else under: {listed(others)}. Save "
            "the model's state dict alone, or call save_pretrained."
        )
    return Container(format, _tensors(file, structure, storages))


def read_training_checkpoint(path: Path, part: range | None = None) -> Container:
    """Return the tensors of nested dictionaries, their keys joined by dots; metadata is the top level, with Stubs.

    part: of MappedFile. Raises CheckpointError if the file is damaged.
    """
    file, format, structure, storages = _open(path, has_stubs=True, part=part)
    found: dict[str, StridedView | Stub] = {}
    length = 0  # of all names: a key may be part of many
    for name, value in _flat(structure, (), count()):
        if name in found:
            raise CheckpointError(f"{path} holds two tensors {shown(name)}: save it again.")
        found[name] = value
        length += len(name)
        if length > len(file):
            raise CheckpointError(f"{path} has {len(file)} bytes and names of more: it is hostile.")
    views = {name: value for name, value in found.items() if isinstance(value, StridedView)}
    unreadable = {
        name: StoredTensor(file, stub.name, (), (), 0)
        for name, stub in found.items()
        if isinstance(stub, Stub)
    }
    return Container(format, {**_tensors(file, views, storages), **unreadable}, fields_of(structure))


def _open(
    path: Path, has_stubs: bool, part: range | None = None
) -> tuple[MappedFile, str, dict, dict[str, ArchiveMember]]:
    file = MappedFile(path, part)
    is_zip = file.data[file.begin : file.begin + 4] == ZIP
    structure, storages = (_read_zip if is_zip else _read_legacy)(file, has_stubs)
    if not isinstance(structure, dict):
        raise CheckpointError(f"{path} holds a {type(structure).__name__} and must hold a state dict.")
    file.release()
    return file, "torch zip" if is_zip else "torch legacy", structure, storages


def _flat(
    structure: dict, path: tuple[str, ...], visits: Iterator[int]
) -> Iterator[tuple[str, StridedView | Stub]]:
    """Yield the tensors in nested dictionaries, and Stubs of unreadable ones. A pickle may contain itself."""
    for key, value in structure.items():
        if next(visits) > MAX_VISITS:
            raise CheckpointError(
                "a torch file holds dictionaries in dictionaries without end: it is hostile."
            )
        name = (*path, str(key))
        is_unreadable = isinstance(value, Stub) and UNREADABLE.search(value.name.rpartition(".")[2])
        if isinstance(value, StridedView) or is_unreadable:
            yield ".".join(name), value
        elif isinstance(value, dict) and len(name) < MAX_DEPTH:
            yield from _flat(value, name, visits)


def _tensors(
    file: MappedFile, views: dict[str, StridedView], storages: dict[str, ArchiveMember]
) -> dict[str, StoredTensor]:
    verify_of = {key: None if part.checksum is None else cache(part.verify) for key, part in storages.items()}
    tensors: dict[str, StoredTensor] = {}
    for name, view in views.items():
        dtype = view.storage.dtype
        shape = view.shape
        strides = view.strides
        found = storages.get(view.storage.key, ArchiveMember(file, "", range(0)))
        itemsize = ITEM_BYTES.get(dtype, 1)
        end = (view.offset + element_extent(shape, strides)) * itemsize
        # A stride of 0 repeats elements.
        if end > len(found.data) or math.prod(shape) * itemsize > len(file):
            raise CheckpointError(
                f"{file.path} holds {len(found.data)} bytes for the storage of {name}, which reaches to byte {end}: "
                "the file is truncated or damaged, download it again."
            )
        offset = found.data.start + view.offset * itemsize
        verify = verify_of.get(view.storage.key)
        tensors[name] = StoredTensor(file, dtype, shape, strides, offset, verify=verify)
    total = sum(tensor.nbytes for tensor in tensors.values())
    if total > MAX_SHARING * len(file):
        raise CheckpointError(
            f"{file.path} has {len(file)} bytes and its tensors claim {total}, sharing their storages beyond reason: "
            "save it again without views that repeat elements."
        )
    return tensors


def _read_zip(file: MappedFile, has_stubs: bool) -> tuple[Any, dict[str, ArchiveMember]]:
    entries = _zip_entries(file)
    if "data.pkl" not in entries:
        raise CheckpointError(f"{file.path} is a zip archive without data.pkl: no torch.save wrote it.")
    if "byteorder" in entries and entries["byteorder"].read() != b"little":
        raise CheckpointError(f"{file.path} was saved on a big-endian machine: convert it to safetensors.")
    storages = {
        name.removeprefix("data/"): entry for name, entry in entries.items() if name.startswith("data/")
    }
    return load_pickle(io.BytesIO(entries["data.pkl"].read()), file.path, has_stubs)[0], storages


def _zip_entries(file: MappedFile) -> dict[str, ArchiveMember]:
    """Return the entries by their names without the folder that all lie in."""
    entries: dict[str, ArchiveMember] = {}
    with parsing(file.path, "zip archive", zipfile.BadZipFile, NotImplementedError, EOFError):
        with zipfile.ZipFile(cast(Any, file.data)) as archive:
            infos = archive.infolist()
        has_checksums = any(
            info.CRC for info in infos
        )  # torch.serialization.set_crc32_options(False): all are 0
        for info in infos:
            name = info.filename.partition("/")[2]
            is_stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
            if not is_stored or info.flag_bits & ENCRYPTED or name in entries:
                raise ValueError(
                    f"its entry {info.filename!r} is compressed, encrypted or repeated, as torch.save never writes it"
                )
            signature, name_size, extra_size = LOCAL_HEADER.unpack_from(file.data, info.header_offset)
            if signature != ZIP:
                raise ValueError(f"its entry {info.filename!r} does not begin as it should")
            start = info.header_offset + LOCAL_HEADER.size + name_size + extra_size
            data = range(start, start + info.file_size)
            entries[name] = ArchiveMember(file, info.filename, data, info.CRC if has_checksums else None)
        check_places((entry.data for entry in entries.values()), len(file))
    return entries


def _read_legacy(file: MappedFile, has_stubs: bool) -> tuple[Any, dict[str, ArchiveMember]]:
    file.data.seek(file.begin)
    load = partial(load_pickle, file.data, file.path, has_stubs)
    is_known = file.data[file.begin : file.begin + 2] == PICKLE
    if not is_known or [load()[0], load()[0]] != [MAGIC_NUMBER, PROTOCOL_VERSION]:
        raise CheckpointError(
            f"{file.path} does not begin as torch.save's files do: download it again, or convert it to safetensors."
        )
    machine, _ = load()
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise CheckpointError(f"{file.path} was saved on a big-endian machine: convert it to safetensors.")
    structure, named = load()
    keys, _ = load()
    unknown = sorted({storage.dtype for storage in named.values()} - set(ITEM_BYTES))
    if unknown:  # the next ones' begin is not known
        raise CheckpointError(
            f"{file.path} holds {listed(unknown)}, which are not implemented: save it without them."
        )
    if not isinstance(keys, list) or any(type(key) is not str or key not in named for key in keys):
        raise CheckpointError(f"{file.path} lists storages that no tensor uses: download it again.")
    storages, position = {}, file.data.tell()
    for key in keys:
        start = position + 8
        size = int.from_bytes(file.data[position:start], "little") * ITEM_BYTES[named[key].dtype]
        storages[key] = ArchiveMember(file, key, range(start, min(start + size, len(file))))
        position = start + size
    return structure, storages
