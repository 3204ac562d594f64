"""What `torch.save` wrote, without torch and without executing its pickle: a state dict, or one with much beside it.

Two forms exist. Since torch 1.6 the file is an uncompressed zip archive of `data.pkl` (the structure of the state
dict) and one `data/<key>` per storage. Before, it was five pickles end to end (a magic number, the version of the
form, facts about the machine, the structure, the storages' keys) and then, for each key, a count of elements and
the elements.
"""

import io
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from tinygpt.weights.containers.container import Container
from tinygpt.weights.containers.mapped_file import MappedFile, MappedTensor, VerifiedTensor, element_extent
from tinygpt.weights.containers.peek import Peek
from tinygpt.weights.containers.pickles.pickle_reader import (
    STORAGE_DTYPES,
    PickleReader,
    Storage,
    StridedView,
    Stub,
    fields_of,
)
from tinygpt.weights.containers.pickles.zip_entries import read_entries
from tinygpt.weights.containers.read_ahead import ReadAhead
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.messages import listed, shown

ZIP, PICKLE = b"PK\x03\x04", b"\x80\x02"  # how files of either form begin
MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
MAX_DEPTH, MAX_VISITS = 8, 1_000_000  # of dictionaries in dictionaries
# Tensors may share a storage, as the layers of some models do. All of them together must not be larger than a file of
# so many such layers: memory stays in proportion to the file.
MAX_SHARING = 100

# What functions and classes are called that make tensors: of other kinds, such as quantised, sparse or NumPy's.
UNREADABLE = re.compile("rebuild|reconstruct|Tensor|Param")
MAX_KIND = 100  # characters of such a name that are looked at: one name may stand for any number of tensors


@dataclass(frozen=True)
class StoredBytes:
    """The bytes of the file that hold a storage, and what raises CheckpointError where they are damaged."""

    data: range
    verify: Callable[[], None]


def is_torch(peek: Peek) -> bool:
    """Every legacy file begins with the pickle of MAGIC_NUMBER, which may be in another of protocol 2's spellings."""
    return peek.head.startswith((ZIP, PICKLE))


def read_torch(path: Path) -> Container:
    """The tensors of a state dict alone. Raises CheckpointError when the file is damaged, hostile or holds more."""
    file, format, structure, storages = _open(path, has_stubs=False)
    _check_state_dict(file, structure)
    return _container(file, format, structure, {}, storages)


def read_training_checkpoint(path: Path, part: range | None = None) -> Container:
    """The tensors of nested dictionaries, their keys joined by dots; the metadata is what stands at the top.

    Objects of other kinds are Stubs there. part: as MappedFile has it. Raises CheckpointError when the file is damaged.
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


def _open(
    path: Path, has_stubs: bool, part: range | None = None
) -> tuple[MappedFile, str, Any, dict[str, StoredBytes]]:
    """The file, the name of its form, the structure in it, and where each storage lies."""
    file = MappedFile(path, part=part)
    is_zip = file.data[file.begin : file.begin + 4] == ZIP
    structure, storages = (_read_zip if is_zip else _read_legacy)(file, has_stubs)
    file.release()
    return file, "torch zip" if is_zip else "torch legacy", structure, storages


def _flat(structure: dict, path: tuple[str, ...], visits: Iterator[int]) -> Iterator[tuple[str, StridedView | Stub]]:
    """The tensors in nested dictionaries, and what stands for those that cannot be read.

    What a pickle builds may contain itself: depth and number are bounded.
    """
    for key, value in structure.items():
        if next(visits) > MAX_VISITS:
            raise CheckpointError("a torch file holds dictionaries in dictionaries without end: it is hostile.")
        name = (*path, str(key))
        if isinstance(value, StridedView) or (isinstance(value, Stub) and _is_tensor(value)):
            yield ".".join(name), value
        elif isinstance(value, dict) and len(name) < MAX_DEPTH:
            yield from _flat(value, name, visits)


def _is_tensor(stub: Stub) -> bool:
    return bool(UNREADABLE.search(stub.name[-MAX_KIND:].rpartition(".")[2]))


def _container(
    file: MappedFile, format: str, views: dict[str, StridedView], metadata: dict, storages: dict[str, StoredBytes]
) -> Container:
    tensors = {name: _tensor(file, name, view, storages) for name, view in views.items()}
    _check_total(file, views)
    return Container(format, tensors, metadata)


def _check_total(file: MappedFile, structure: dict[str, StridedView]) -> None:
    total = sum(math.prod(view.shape) * _itemsize(view.storage) for view in structure.values())
    if total > MAX_SHARING * len(file):
        raise CheckpointError(
            f"{file.path} has {len(file)} bytes and its tensors claim {total}, sharing their storages beyond reason: "
            "save it again without views that repeat elements."
        )


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
            f"{listed(others)}. Save the model's state dict alone, or call save_pretrained."
        )


def _tensor(file: MappedFile, name: str, view: StridedView, storages: dict[str, StoredBytes]) -> VerifiedTensor:
    """Put a view into the file, checked against its storage so that nothing outside is ever read."""
    storage = view.storage
    found = storages.get(storage.key, NOWHERE)
    itemsize = _itemsize(storage)
    end = (view.offset + element_extent(view.shape, view.strides)) * itemsize
    # A stride of 0 repeats elements: what comes of it must not be larger than a file that could hold it.
    if end > len(found.data) or math.prod(view.shape) * itemsize > len(file):
        raise CheckpointError(
            f"{file.path} holds {len(found.data)} bytes for the storage of {name}, which reaches to byte {end}: "
            "the file is truncated or damaged, download it again."
        )
    offset = found.data.start + view.offset * itemsize
    return VerifiedTensor(file, storage.dtype, view.shape, view.strides, offset, found.verify)


def _itemsize(storage: Storage) -> int:
    """1 for a dtype that cannot be read."""
    if storage.dtype not in STORAGE_DTYPES.values():
        return 1
    return 2 if storage.dtype == "bfloat16" else np.dtype(storage.dtype).itemsize


def _read_zip(file: MappedFile, has_stubs: bool) -> tuple[Any, dict[str, StoredBytes]]:
    """The structure, and where each storage lies."""
    entries = read_entries(file)
    if "data.pkl" not in entries:
        raise CheckpointError(f"{file.path} is a zip archive without data.pkl: no torch.save wrote it.")
    if "byteorder" in entries and entries["byteorder"].read() != b"little":
        raise CheckpointError(f"{file.path} was saved on a big-endian machine: convert it to safetensors.")
    lying = {name.removeprefix("data/"): entry for name, entry in entries.items() if name.startswith("data/")}
    ahead = ReadAhead(lying.values())
    storages = {key: StoredBytes(entry.data, partial(ahead.verify, entry)) for key, entry in lying.items()}
    return PickleReader(io.BytesIO(entries["data.pkl"].read()), file.path, has_stubs).read(), storages


def _read_legacy(file: MappedFile, has_stubs: bool) -> tuple[Any, dict[str, StoredBytes]]:
    """The structure, and where each storage lies. The form has no checksums."""
    file.data.seek(file.begin)
    reader = PickleReader(file.data, file.path, has_stubs)
    if (
        file.data[file.begin : file.begin + 2] != PICKLE
        or reader.read() != MAGIC_NUMBER
        or reader.read() != PROTOCOL_VERSION
    ):
        raise CheckpointError(
            f"{file.path} does not begin as torch.save's files do: download it again, or convert it to safetensors."
        )
    machine = reader.read()
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise CheckpointError(f"{file.path} was saved on a big-endian machine: convert it to safetensors.")
    structure, keys = reader.read(), reader.read()
    return structure, _legacy_storages(file, reader.storages, keys)


def _legacy_storages(file: MappedFile, named: dict[str, Storage], keys: Any) -> dict[str, StoredBytes]:
    itemsizes = {key: _itemsize(storage) for key, storage in named.items()}
    unknown = sorted({storage.dtype for storage in named.values()} - set(STORAGE_DTYPES.values()))
    if unknown:  # how long they are is not known, nor where the next ones begin
        raise CheckpointError(f"{file.path} holds {listed(unknown)}, which are not implemented: save it without them.")
    if not isinstance(keys, list) or any(type(key) is not str or key not in itemsizes for key in keys):
        raise CheckpointError(f"{file.path} lists storages that no tensor uses: download it again.")
    storages, position = {}, file.data.tell()
    for key in keys:
        start = position + 8
        size = int.from_bytes(file.data[position:start], "little") * itemsizes[key]
        storages[key] = StoredBytes(range(start, min(start + size, len(file))), _nothing_to_verify)
        position = start + size
    return storages


def _nothing_to_verify() -> None:
    pass


NOWHERE = StoredBytes(range(0), _nothing_to_verify)
