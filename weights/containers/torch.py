"""Files of torch.save, read without torch: a state dict, or a training checkpoint that holds much more.

Since torch 1.6: an uncompressed zip archive of `data.pkl`, the structure, and `data/<key>` for each storage. Before:
five pickles (magic number, version, machine, structure, keys), then for each key a count of elements and the elements.

A pickle can name any function for Python to call. Here the names are a closed list; others are refused, or become
Stubs in a training checkpoint. No code of a file runs.
"""

import io
import math
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from ..errors import CheckpointError, listed, shown
from ..files import open_regular
from ..tensor import (
    ITEMSIZE,
    ArchiveMember,
    Container,
    MappedFile,
    StoredTensor,
    check_places,
    contiguous_strides,
    element_extent,
    is_possible_shape,
    parsing,
)
from .formats import PICKLE, ZIP

STORAGE_DTYPES = {
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "DoubleStorage": "float64",
    "ByteStorage": "uint8",  # integers and booleans are masks, which are never read
    "BoolStorage": "bool",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
}
MAX_STUBS, MAX_NAME = 10_000, 100  # classes, characters of a name
MAX_INSTRUCTIONS = 1_000_000  # a tensor takes some fifty


@dataclass(frozen=True, slots=True)
class Storage:
    """A flat array of `size` elements, under `key` in the file."""

    key: str
    dtype: str
    size: int


@dataclass(frozen=True, slots=True)
class StridedView:
    """A tensor: `shape` and `strides`, in elements, over `storage` from element `offset` on."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Stub:
    """An object of a class that is not on the list: its name and attributes."""

    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Stub":
        stub = object.__new__(cls)
        stub.state = {}
        return stub

    def __init__(self, *args: Any, **kwargs: Any): ...

    def __call__(self, *args: Any) -> "Stub":
        return type(self)()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.state = fields_of(state)

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None: ...


class SetItems(list):
    """The items of a set, such as a module's names of buffers, none of which is hashed."""

    add = list.append


class CheckedDict(dict):
    """A dictionary without attributes (a state dict's `_metadata`), whose keys are names.

    Others are left out, or refused if it is strict: to hash nested tuples or colliding ints takes for ever.
    """

    def __init__(self, is_strict: bool):
        self.is_strict = is_strict

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(key) is str or (type(key) is int and abs(key) < 2**31):
            super().__setitem__(key, value)
        elif self.is_strict:
            raise ValueError("a key of a dictionary that is no string")

    def __setstate__(self, state: Any) -> None: ...


class TorchUnpickler(pickle._Unpickler):
    """Python's own unpickler in Python, whose instructions can be overridden. has_stubs: other names become Stubs."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, program: bytes, path: Path, has_stubs: bool, pushed: int):
        super().__init__(io.BytesIO(program), encoding="latin1")
        self.path, self.has_stubs = path, has_stubs
        self.storages: dict[str, Storage] = {}
        self._stubs: dict[str, type[Stub]] = {}
        self._unspent = pushed  # instructions: an honest file takes one for each item of a dictionary
        self._allowed = {
            "collections.OrderedDict": self._checked_dict,
            "torch._utils._rebuild_tensor_v2": self._strided_view,
            "torch._utils._rebuild_parameter": lambda view, _requires_grad, _hooks: view,
            **{f"torch.{storage}": dtype for storage, dtype in STORAGE_DTYPES.items()},
        }
        if has_stubs:
            self._allowed |= dict.fromkeys(("builtins.set", "__builtin__.set"), self._set_items)

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name in self._allowed:
            return self._allowed[full_name]
        if self.has_stubs and len(self._stubs) < MAX_STUBS:
            return self._stubs.setdefault(full_name, type("Stub", (Stub,), {"name": full_name[-MAX_NAME:]}))
        raise CheckpointError(
            f"{self.path} asks for {full_name!r}, which no tensor needs and which could run any program: nothing was "
            "run. If you trust the file, convert it to safetensors with the library that wrote it."
        )

    def persistent_load(self, record: Any) -> Storage:
        match record:  # None: the legacy form's view of a storage
            case ("storage", kind, str(key), _, size) | ("storage", kind, str(key), _, size, None):
                storage = Storage(key, kind if isinstance(kind, str) else getattr(kind, "name", ""), size)
                if is_possible_shape([size]) and self.storages.setdefault(key, storage) == storage:
                    return storage
        raise ValueError("a storage in a form that is not known, or of two dtypes or sizes")

    def load_build(self) -> None:
        if not isinstance(self.stack[-2], Stub | CheckedDict):  # a checked view would take other numbers
            raise ValueError("attributes for an object that has none")
        super().load_build()

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append(self._checked_dict(zip(items[::2], items[1::2], strict=True)))

    dispatch |= {pickle.BUILD[0]: load_build, pickle.DICT[0]: load_dict}
    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.append(self._checked_dict())
    dispatch[pickle.EMPTY_SET[0]] = lambda self: self.append(SetItems())

    def _set_items(self, items: Any = ()) -> SetItems:
        """Return a list of a list's items: a text or another object may have more than the file."""
        if type(items) not in (list, tuple):
            raise ValueError("a set of something else than a list")
        self._unspent -= len(items)
        if self._unspent < 0:
            raise ValueError("one list that is given to many sets")
        return SetItems(items)

    def _checked_dict(self, pairs: Iterable[Any] = ()) -> CheckedDict:
        checked = CheckedDict(is_strict=not self.has_stubs)
        for key, value in pairs:
            checked[key] = value
            self._unspent -= 1
            if self._unspent < 0:
                raise ValueError("one list that is given to many dictionaries")
        return checked

    def _strided_view(self, storage, offset, shape, strides, _requires_grad, _hooks, _metadata=None) -> Any:
        if isinstance(storage, Stub):
            return storage
        if type(storage) is not Storage or type(shape) is not tuple or type(strides) is not tuple:
            raise ValueError("a tensor without a storage, sizes and strides")
        if len(shape) != len(strides) or not all(map(is_possible_shape, ([offset], shape, strides))):
            raise ValueError(
                f"a tensor of an impossible shape, {len(shape)} sizes and {len(strides)} strides"
            )
        return StridedView(storage, offset, shape, strides)


def load_pickle(file: Any, path: Path, has_stubs: bool) -> tuple[Any, dict[str, Storage]]:
    """Return the next object in `file`, and the storages that it names. Raise CheckpointError if it is damaged."""
    start = file.tell()
    with parsing(path, "pickle", Exception):  # any instruction may meet an object that it was not made for
        # Before any is executed: Python allocates the memory that an instruction claims.
        for pushed, (opcode, argument, _) in enumerate(pickletools.genops(file)):
            if pushed >= MAX_INSTRUCTIONS or (
                opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > MAX_INSTRUCTIONS
            ):
                raise ValueError(f"more than {MAX_INSTRUCTIONS} instructions")
            if opcode.name == "FROZENSET" or (opcode.name == "EMPTY_SET" and not has_stubs):
                raise ValueError("a set, which no state dict has")
        stop = file.tell()
        file.seek(start)
        unpickler = TorchUnpickler(file.read(stop - start), path, has_stubs, pushed)
        return unpickler.load(), unpickler.storages


def read_plain_pickle(path: Path) -> Any:
    """Return the object in a file that is a pickle alone. Raise CheckpointError if it cannot be read."""
    with parsing(path, "file"), open_regular(path) as file:  # which the map would follow out of its folder
        return load_pickle(file, path, has_stubs=False)[0]


def fields_of(value: Any) -> dict[str, Any]:
    """Return the items of a dict, or an object's attributes (argparse's Namespace), whose names are texts."""
    fields = value.state if isinstance(value, Stub) else value
    return (
        {name: field for name, field in fields.items() if isinstance(name, str)}
        if isinstance(fields, dict)
        else {}
    )


LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip entry: signature, lengths of name and extra field
MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
ITEM_BYTES = {**ITEMSIZE, "uint8": 1, "bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8}
MAX_HEADER = 2**16  # bytes of an array's header
MAX_DEPTH, MAX_VISITS = 8, 1_000_000  # of dictionaries in dictionaries
MAX_MODULE_DEPTH = 100
SAVE_STATE = "Save the model's state_dict() with torch.save."
MAX_SHARING = 100  # of a file's bytes, by all tensors: the layers of some models share a storage
# Names of functions and classes that make other tensors: quantized, sparse or NumPy's.
UNREADABLE = re.compile("rebuild|reconstruct|Tensor|Param")
ENCRYPTED = 1  # a flag of a zip entry


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
    leaves: dict[str, StridedView | Stub] = {}
    dicts: dict[str, str] = {}
    length = 0  # of all names: a key may be part of many
    for place, key, value in _flat(structure, (), count()):
        name = ".".join([*place, key])
        if name in leaves:
            raise CheckpointError(f"{path} holds two tensors {shown(name)}: save it again.")
        leaves[name], dicts[name] = value, ".".join(place)
        length += len(name)
        if length > len(file):
            raise CheckpointError(f"{path} has {len(file)} bytes and names of more: it is hostile.")
    views = {name: value for name, value in leaves.items() if isinstance(value, StridedView)}
    unreadable = {
        name: StoredTensor(file, stub.name, (), (), 0)
        for name, stub in leaves.items()
        if isinstance(stub, Stub)
    }
    tensors = {**_tensors(file, views, storages), **unreadable}
    return Container(format, tensors, fields_of(structure), dicts=dicts)


def _open(
    path: Path, has_stubs: bool, part: range | None = None
) -> tuple[MappedFile, str, dict, dict[str, ArchiveMember]]:
    file = MappedFile(path, part)
    is_zip = file.data[file.begin : file.begin + 4] == ZIP
    structure, storages = (_read_zip if is_zip else _read_legacy)(file, has_stubs)
    if _is_module(structure):
        structure = {"model": structure}
    if not isinstance(structure, dict):
        raise CheckpointError(f"{path} holds a {type(structure).__name__} and must hold a state dict.")
    file.release()
    return file, "torch zip" if is_zip else "torch legacy", structure, storages


def _flat(
    structure: dict, path: tuple[str, ...], visits: Iterator[int]
) -> Iterator[tuple[tuple[str, ...], str, StridedView | Stub]]:
    """Yield the tensors in nested dictionaries, with the keys to them, and Stubs of unreadable ones.

    A pickle may contain itself.
    """
    for key, value in structure.items():
        if next(visits) > MAX_VISITS:
            raise CheckpointError(
                "a torch file holds dictionaries in dictionaries without end: it is hostile."
            )
        is_unreadable = isinstance(value, Stub) and UNREADABLE.search(value.name.rpartition(".")[2])
        if isinstance(value, StridedView) or is_unreadable:
            yield path, str(key), value
        elif isinstance(value, dict) and len(path) < MAX_DEPTH - 1:
            yield from _flat(value, (*path, str(key)), visits)
        elif _is_module(value):
            yield from _flat(dict(_state_of(value, "", visits)), (*path, str(key)), visits)


def _is_module(value: Any) -> bool:
    """Return whether a Stub stands for a torch.nn.Module, which torch.save wrote whole."""
    return isinstance(value, Stub) and fields_of(value).keys() >= {"_parameters", "_buffers", "_modules"}


def _state_of(module: Any, prefix: str, visits: Iterator[int]) -> Iterator[tuple[str, Any]]:
    """Yield a module's tensors by the names in its state_dict."""
    fields = fields_of(module)
    if next(visits) > MAX_VISITS or prefix.count(".") > MAX_MODULE_DEPTH:
        raise CheckpointError("a torch file holds modules in modules without end: it is hostile.")
    unsaved = fields.get("_non_persistent_buffers_set")
    unsaved = {name for name in unsaved if type(name) is str} if isinstance(unsaved, SetItems) else set()
    for name, value in {**fields_of(fields["_parameters"]), **fields_of(fields["_buffers"])}.items():
        if name not in unsaved:
            yield prefix + name, value
    for name, child in fields_of(fields["_modules"]).items():
        if _is_module(child):
            yield from _state_of(child, f"{prefix}{name}.", visits)


def _tensors(
    file: MappedFile, views: dict[str, StridedView], storages: dict[str, ArchiveMember]
) -> dict[str, StoredTensor]:
    verify_of = {key: None if part.checksum is None else cache(part.verify) for key, part in storages.items()}
    tensors: dict[str, StoredTensor] = {}
    for name, view in views.items():
        dtype = view.storage.dtype
        shape = view.shape
        strides = view.strides
        storage = storages.get(view.storage.key, ArchiveMember(file, "", range(0)))
        itemsize = ITEM_BYTES.get(dtype, 1)
        end = (view.offset + element_extent(shape, strides)) * itemsize
        # A stride of 0 repeats elements.
        if end > len(storage.data) or math.prod(shape) * itemsize > len(file):
            raise CheckpointError(
                f"{file.path} holds {len(storage.data)} bytes for the storage of {name}, which reaches to byte {end}: "
                "the file is truncated or damaged, download it again."
            )
        offset = storage.data.start + view.offset * itemsize
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
        raise CheckpointError(
            f"{file.path} is a zip archive without data.pkl: no torch.save wrote it. {SAVE_STATE}"
        )
    if "byteorder" in entries and entries["byteorder"].read() != b"little":
        raise CheckpointError(f"{file.path} was saved on a big-endian machine: convert it to safetensors.")
    storages = {
        name.removeprefix("data/"): entry for name, entry in entries.items() if name.startswith("data/")
    }
    return load_pickle(io.BytesIO(entries["data.pkl"].read()), file.path, has_stubs)[0], storages


def read_npz(path: Path) -> Container:
    """Return the arrays of np.savez; metadata is whole numbers alone. Raise CheckpointError for compressed ones."""
    file = MappedFile(path)
    tensors, metadata = {}, {}
    for member, entry in _zip_entries(file, is_numpys=True).items():
        name = member.removesuffix(".npy")
        with parsing(path, "NumPy archive", EOFError):
            header = io.BytesIO(
                file.data[entry.data.start : min(entry.data.stop, entry.data.start + MAX_HEADER)]
            )
            is_first = np.lib.format.read_magic(header) == (1, 0)
            read = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(header)
            size = len(entry.data) - header.tell()
            if not is_possible_shape(shape) or math.prod(shape) * dtype.itemsize != size:
                raise ValueError(f"an array {shown(name)} of {size} bytes and shape {shape}")
        strides = contiguous_strides(shape[::-1])[::-1] if is_fortran else contiguous_strides(shape)
        kind = dtype.name if dtype == dtype.newbyteorder("<") else dtype.str
        offset = entry.data.start + header.tell()
        tensor = StoredTensor(file, kind, shape, strides, offset, verify=cache(entry.verify))
        if shape == () and dtype.kind in "iu":
            metadata[name] = tensor.array(dtype).item()
        else:
            tensors[name] = tensor
    file.release()
    return Container("NumPy archive", tensors, metadata)


def _zip_entries(file: MappedFile, is_numpys: bool = False) -> dict[str, ArchiveMember]:
    """Return the entries by their names, of torch without the folder that all lie in."""
    entries: dict[str, ArchiveMember] = {}
    with parsing(file.path, "zip archive", zipfile.BadZipFile, NotImplementedError, EOFError):
        with zipfile.ZipFile(cast(Any, file.data)) as archive:
            infos = archive.infolist()
        # torch.serialization.set_crc32_options(False): all are 0.
        has_checksums = any(info.CRC for info in infos)
        for info in infos:
            name = info.filename if is_numpys else info.filename.partition("/")[2]
            is_stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
            if is_numpys and not is_stored:
                raise CheckpointError(
                    f"{file.path} is an archive of NumPy with compressed arrays, such as {shown(name)}: save it by "
                    "np.savez, not savez_compressed."
                )
            if not is_numpys and name.startswith("code/"):
                raise CheckpointError(
                    f"{file.path} is TorchScript, a program, which is not run. {SAVE_STATE}"
                )
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
