"""GGUF files made with struct alone, in any types, to be damaged or read."""

import struct
from collections.abc import Mapping

import numpy as np

NUMBERS = {0: "B", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q"}
STRING, ARRAY = 8, 9


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value(kind: int, content) -> bytes:
    """A value; the content of an array is (its elements' kind, them)."""
    if kind == STRING:
        return string(content)
    if kind != ARRAY:
        return struct.pack(f"<{NUMBERS[kind]}", content)
    inner, elements = content
    return struct.pack("<IQ", inner, len(elements)) + b"".join(value(inner, element) for element in elements)


def gguf_bytes(
    keys: Mapping[str, tuple], tensors: Mapping[str, tuple], version: int = 3, alignment: int = 32
) -> bytes:
    """keys: name -> (kind, content). tensors: name -> (shape, ggml type, bytes)."""
    parts = [b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))]
    parts += [
        string(name) + struct.pack("<I", kind) + value(kind, content)
        for name, (kind, content) in keys.items()
    ]
    offset = 0
    for name, (shape, kind, data) in tensors.items():
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        parts.append(string(name) + sizes + struct.pack("<IQ", kind, offset))
        offset += -(-len(data) // alignment) * alignment
    parts = [b"".join(parts), *(data for *_, data in tensors.values())]
    return b"".join(data + b"\0" * (-len(data) % alignment) for data in parts)


def plain(array: np.ndarray) -> tuple:
    """float32, float16, or bfloat16 as uint16."""
    return array.shape, {"float32": 0, "float16": 1, "uint16": 30}[array.dtype.name], array.tobytes()
