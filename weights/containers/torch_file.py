"""pytorch_model.bin: a state dict as `torch.save` wrote it, without torch and without executing its pickle.

Two forms exist. Since torch 1.6 the file is an uncompressed zip archive of `data.pkl` (the structure of the state
dict) and one `data/<key>` per storage. Before, it was five pickles end to end (a magic number, the version of the
form, facts about the machine, the structure, the storages' keys) and then, for each key, a count of elements and
the elements.
"""

import io
import math
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from tinygpt.errors import CheckpointError
from tinygpt.weights.containers.container import Container
from tinygpt.weights.containers.mapped_file import MappedFile, MappedTensor, element_extent
from tinygpt.weights.containers.pickle_reader import PickleReader, Storage, StridedView

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip entry: signature, lengths of its name and its extra field


def read_torch(path: Path) -> Container:
    """The tensors of a state dict. Raises CheckpointError when the file is damaged or hostile."""
    file = MappedFile(path)
    if file.data[:4] == b"PK\x03\x04":
        structure, storages = _read_zip(file)
    else:
        structure, storages = _read_legacy(file)
    _check_state_dict(file, structure)
    return Container({name: _tensor(file, name, view, storages) for name, view in structure.items()})


def _check_state_dict(file: MappedFile, structure: Any) -> None:
    if not isinstance(structure, dict):
        raise CheckpointError(f"{file.path} holds a {type(structure).__name__} and must hold a state dict.")
    others = [
        str(name)
        for name, value in structure.items()
        if not isinstance(name, str) or not isinstance(value, StridedView)
    ]
    if others:
        raise CheckpointError(
            f"{file.path} must hold a state dict (tensors by name) and holds something else under: "
            f"{', '.join(others)}. Save the model's state dict alone, or call save_pretrained."
        )


def _tensor(file: MappedFile, name: str, view: StridedView, storages: dict[str, range]) -> MappedTensor:
    """Put a view into the file, checked against its storage so that nothing outside is ever read."""
    storage = view.storage
    found = storages.get(storage.key, range(0))
    itemsize = _itemsize(storage)
    end = (view.offset + element_extent(view.shape, view.strides)) * itemsize
    # A stride of 0 repeats elements: what comes of it must not be larger than a file that could hold it.
    if end > len(found) or math.prod(view.shape) * itemsize > len(file):
        raise CheckpointError(
            f"{file.path} holds {len(found)} bytes for the storage of {name}, which reaches to byte {end}: "
            "the file is truncated or damaged, download it again."
        )
    return MappedTensor(file, storage.dtype, view.shape, view.strides, found.start + view.offset * itemsize)


def _itemsize(storage: Storage) -> int:
    return 2 if storage.dtype == "bfloat16" else np.dtype(storage.dtype).itemsize


def _read_zip(file: MappedFile) -> tuple[Any, dict[str, range]]:
    """The structure, and the bytes of the file that hold each storage."""
    try:
        with zipfile.ZipFile(file.path) as archive:
            entries = _entries(file, archive)
            for name in {"data.pkl"} - entries.keys():
                raise CheckpointError(f"{file.path} is a zip archive without {name}: no torch.save wrote it.")
            if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
                raise CheckpointError(f"{file.path} was saved on a big-endian machine: convert it to safetensors.")
            pickled = archive.read(entries["data.pkl"])
        storages = {
            name.removeprefix("data/"): _entry_bytes(file, entry)
            for name, entry in entries.items()
            if name.startswith("data/")
        }
    except (zipfile.BadZipFile, NotImplementedError, UnicodeError, EOFError, OSError) as error:
        message = f"{file.path} is a damaged zip archive ({error}): download it again."
        raise CheckpointError(message) from error
    return PickleReader(io.BytesIO(pickled), file.path).read(), storages


def _entries(file: MappedFile, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The archive's entries without the folder that all of them lie in; each must be stored as it is."""
    entries = {}
    for entry in archive.infolist():
        name = entry.filename.partition("/")[2]
        stored = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
        if not stored or entry.flag_bits & 1 or name in entries:
            raise CheckpointError(
                f"{file.path} is a zip archive whose entry {entry.filename!r} is compressed, encrypted or "
                "repeated, as torch.save never does: save it again with torch.save or as safetensors."
            )
        entries[name] = entry
    return entries


def _entry_bytes(file: MappedFile, entry: zipfile.ZipInfo) -> range:
    """Where an entry's data lie. The lengths before them are only in the entry's own header."""
    start = entry.header_offset + LOCAL_HEADER.size
    if not LOCAL_HEADER.size <= start <= len(file):
        raise zipfile.BadZipFile(f"the entry {entry.filename!r} begins outside the file")
    signature, name_size, extra_size = LOCAL_HEADER.unpack_from(file.data, entry.header_offset)
    start += name_size + extra_size
    if signature != b"PK\x03\x04" or start + entry.file_size > len(file):
        raise zipfile.BadZipFile(f"the entry {entry.filename!r} reaches beyond the file")
    return range(start, start + entry.file_size)


def _read_legacy(file: MappedFile) -> tuple[Any, dict[str, range]]:
    """The structure, and the bytes of the file that hold each storage."""
    file.data.seek(0)
    reader = PickleReader(file.data, file.path)
    if file.data[:2] != b"\x80\x02" or reader.read() != MAGIC_NUMBER or reader.read() != PROTOCOL_VERSION:
        raise CheckpointError(
            f"{file.path} does not begin as torch.save's files do: download it again, or convert it to safetensors."
        )
    machine = reader.read()
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise CheckpointError(f"{file.path} was saved on a big-endian machine: convert it to safetensors.")
    structure, keys = reader.read(), reader.read()
    return structure, _legacy_storages(file, structure, keys)


def _legacy_storages(file: MappedFile, structure: Any, keys: Any) -> dict[str, range]:
    _check_state_dict(file, structure)
    itemsizes = {view.storage.key: _itemsize(view.storage) for view in structure.values()}
    if not isinstance(keys, list) or any(type(key) is not str or key not in itemsizes for key in keys):
        raise CheckpointError(f"{file.path} lists storages that no tensor uses: download it again.")
    storages, position = {}, file.data.tell()
    for key in keys:
        start = position + 8
        size = int.from_bytes(file.data[position:start], "little") * itemsizes[key]
        storages[key] = range(start, min(start + size, len(file)))
        position = start + size
    return storages
