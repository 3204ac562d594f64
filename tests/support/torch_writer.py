"""Files as torch.save writes them, made without torch: what it would pickle, instruction by instruction."""

import io
import struct
import zipfile
from argparse import Namespace
from typing import Any

import numpy as np

MAGIC_NUMBER, PROTOCOL_VERSION = 0x1950A86A20F9469CFC6C, 1001
STORAGES = {"float32": "FloatStorage", "float16": "HalfStorage", "float64": "DoubleStorage", "bool": "BoolStorage"}
STORAGES |= {"uint8": "ByteStorage", "int64": "LongStorage", "uint16": "BFloat16Storage"}


class Call:
    """Pickled as a call of `name`, "module attribute", with arguments."""

    def __init__(self, name: str, *arguments: Any):
        self.name, self.arguments = name, arguments


class Global:
    """Pickled as the name of a function or class, "module attribute"."""

    def __init__(self, name: str):
        self.name = name


class _Writer:
    """Arrays of one identity share a storage. is_legacy: a storage's record has a sixth element."""

    def __init__(self, is_legacy: bool):
        self.is_legacy = is_legacy
        self.arrays: dict[int, np.ndarray] = {}

    def pickle(self, value: Any) -> bytes:
        return b"\x80\x02" + self.emit(value) + b"."

    def emit(self, value: Any) -> bytes:
        if value is None or isinstance(value, bool):
            return {None: b"N", True: b"\x88", False: b"\x89"}[value]
        if isinstance(value, int):
            size = (value.bit_length() + 8) // 8
            return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
        if isinstance(value, float):
            return b"G" + struct.pack(">d", value)
        if isinstance(value, str):
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        if isinstance(value, dict):
            return b"}(" + b"".join(self.emit(key) + self.emit(item) for key, item in value.items()) + b"u"
        if isinstance(value, list):
            return b"](" + b"".join(map(self.emit, value)) + b"e"
        if isinstance(value, tuple):
            return b"(" + b"".join(map(self.emit, value)) + b"t"
        if isinstance(value, Namespace):
            return b"cargparse\nNamespace\n)\x81" + self.emit(vars(value)) + b"b"
        if isinstance(value, Call):
            return self.emit(Global(value.name)) + self.emit(value.arguments) + b"R"
        if isinstance(value, Global):
            return b"c" + value.name.replace(" ", "\n").encode() + b"\n"
        return self._tensor(value)

    def _tensor(self, array: np.ndarray) -> bytes:
        keys = [*self.arrays]
        self.arrays[id(array)] = array
        key = str(keys.index(id(array)) if id(array) in keys else len(keys))
        kind = Global(f"torch {STORAGES[array.dtype.name]}")
        record = ("storage", kind, key, "cpu", array.size, *([None] if self.is_legacy else []))
        strides = tuple(stride // array.itemsize for stride in np.empty(array.shape, array.dtype).strides)
        arguments = self.emit(record) + b"Q" + b"".join(map(self.emit, (0, array.shape, strides, False, {})))
        return self.emit(Global("torch._utils _rebuild_tensor_v2")) + b"(" + arguments + b"tR"


def torch_zip(value: Any) -> bytes:
    """uint16 stands for bfloat16."""
    writer, buffer = _Writer(is_legacy=False), io.BytesIO()
    structure = writer.pickle(value)
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", structure)
        archive.writestr("archive/byteorder", "little")
        for key, array in enumerate(writer.arrays.values()):
            archive.writestr(f"archive/data/{key}", array.tobytes())
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def torch_legacy(value: Any) -> bytes:
    writer = _Writer(is_legacy=True)
    machine = {"protocol_version": PROTOCOL_VERSION, "little_endian": True}
    head = b"".join(map(writer.pickle, (MAGIC_NUMBER, PROTOCOL_VERSION, machine, value)))
    keys = writer.pickle([str(key) for key in range(len(writer.arrays))])
    storages = (struct.pack("<Q", array.size) + array.tobytes() for array in writer.arrays.values())
    return head + keys + b"".join(storages)
