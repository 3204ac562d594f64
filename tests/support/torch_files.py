"""Files of torch.save, by torch where it is installed, and else by a pickler that knows its names."""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from support.recorded import HAS_TRANSFORMERS
from tinygpt.weights.containers.torch import MAGIC_NUMBER, PROTOCOL_VERSION

# Parts of pickles written by hand, protocol 2.

TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
ORDERED_DICT = b"ccollections\nOrderedDict\n"


def program(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


RECORD = (
    b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x04"
)  # without its end
STORAGE = RECORD + b"tQ"  # of 4 elements


def torch_bytes(value: Any, is_legacy: bool = False) -> bytes:
    """`value` saved, where arrays, in dicts and lists too, stand for tensors. is_legacy: as before torch 1.6."""
    if not HAS_TRANSFORMERS:
        return own_bytes(value, is_legacy)
    import torch

    buffer = io.BytesIO()
    torch.save(_with_tensors(value, {}), buffer, _use_new_zipfile_serialization=not is_legacy)
    return buffer.getvalue()


def own_bytes(value: Any, is_legacy: bool = False) -> bytes:
    """The same without torch."""
    storages: dict[str, np.ndarray] = {}
    _Pickler(pickled := io.BytesIO(), storages, is_legacy).dump(value)
    structure = pickled.getvalue()
    buffer = io.BytesIO()
    if is_legacy:
        machine = {"little_endian": True, "protocol_version": PROTOCOL_VERSION}
        heads = [pickle.dumps(part, protocol=2) for part in (MAGIC_NUMBER, PROTOCOL_VERSION, machine)]
        counted = [array.size.to_bytes(8, "little") + array.tobytes() for array in storages.values()]
        return b"".join([*heads, structure, pickle.dumps(list(storages), protocol=2), *counted])
    with zipfile.ZipFile(buffer, "w") as archive:
        data = {f"data/{key}": array.tobytes() for key, array in storages.items()}
        entries = {"data.pkl": structure, "byteorder": b"little", **data, "version": b"3\n"}
        for name, content in entries.items():
            archive.writestr(_aligned(f"archive/{name}", buffer.tell()), content)
    return buffer.getvalue()


def _aligned(name: str, offset: int) -> zipfile.ZipInfo:
    """An entry whose data begin at a multiple of 64 bytes, by a field that means nothing, as torch has it."""
    info, header = zipfile.ZipInfo(name), 30
    size = -(offset + header + len(name) + 4) % 64
    info.extra = b"FB" + size.to_bytes(2, "little") + b"Z" * size
    return info


def _with_tensors(value: Any, made: dict[int, Any]) -> Any:
    """made: by the array's id, so that one array is one storage, however often it comes."""
    import torch

    if isinstance(value, dict):
        return {name: _with_tensors(part, made) for name, part in value.items()}
    if isinstance(value, list):
        return [_with_tensors(part, made) for part in value]
    if isinstance(value, np.ndarray):
        return made.setdefault(id(value), torch.from_numpy(value))
    return value


@dataclass(frozen=True)
class Global:
    """What a module calls something, as "module name"; never looked up, as the module may be absent."""

    name: str

    def __call__(self) -> None:
        """A pickler asks whether what it writes a call of can be called."""


class Call:
    """Pickled as a call of a Global by this name."""

    def __init__(self, name: str, *arguments: Any):
        self.function = Global(name)
        self.arguments = arguments


@dataclass(frozen=True, eq=False)
class _Storage:
    array: np.ndarray

    @property
    def kind(self) -> Global:
        names = {"float16": "Half", "float32": "Float", "float64": "Double", "int64": "Long", "uint8": "Byte"}
        return Global(f"torch {names[self.array.dtype.name]}Storage")


class _Pickler(pickle._Pickler):  # the one in Python, which can be taught names
    def __init__(self, file: io.BytesIO, storages: dict[str, np.ndarray], is_legacy: bool):
        super().__init__(file, protocol=2)
        self.storages = storages
        self.more = (None,) if is_legacy else ()  # once said of a storage that is part of another

    def persistent_id(self, value: Any) -> tuple | None:
        if not isinstance(value, _Storage):
            return None
        key = str(len(self.storages))
        self.storages[key] = value.array
        return "storage", value.kind, key, "cpu", value.array.size, *self.more

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Call):
            return value.function, value.arguments
        if not isinstance(value, np.ndarray):
            return NotImplemented
        strides = tuple(stride // value.itemsize for stride in value.strides)
        arguments = (_Storage(value), 0, value.shape, strides, False, OrderedDict())
        return Global("torch._utils _rebuild_tensor_v2"), arguments

    def _save_global(self, value: Global) -> None:
        module, name = value.name.split(" ")
        self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())

    dispatch: ClassVar = {**pickle._Pickler.dispatch, Global: _save_global}
