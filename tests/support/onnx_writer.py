"""ONNX files made field by field: initialisers in every encoding, and a few nodes around them."""

from collections.abc import Mapping

import numpy as np

from support.tf_writer import field, varint

DTYPES = {"float32": 1, "int64": 7, "float16": 10, "float64": 11, "uint16": 16}  # uint16: bfloat16's bits


def tensor(name: str, array: np.ndarray, encoding: str = "raw", **external: object) -> bytes:
    """encoding: raw; listed (one by one, packed); or external, at a location, offset and length."""
    kind = array.dtype.name
    out = b"".join(field(1, size) for size in array.shape) + field(2, DTYPES[kind]) + field(8, name.encode())
    if encoding == "raw":
        return out + field(9, array.tobytes())
    if encoding == "external":
        entries = (field(1, key.encode()) + field(2, str(value).encode()) for key, value in external.items())
        return out + b"".join(field(13, entry) for entry in entries) + field(14, 1)
    if kind in ("float32", "float64"):
        return out + field(4 if kind == "float32" else 10, array.tobytes())
    return out + field(5, b"".join(varint(int(bits)) for bits in array.view(np.uint16).reshape(-1)))


def attribute(name: str, value: int | float | str | bytes) -> bytes:
    """bytes are a graph."""
    head = field(1, name.encode())
    if isinstance(value, float):
        return head + varint(2 << 3 | 5) + np.float32(value).tobytes()
    if isinstance(value, str):
        return head + field(4, value.encode())
    return head + (field(6, value) if isinstance(value, bytes) else field(3, value))


def node(kind: str, inputs: list[str], outputs: list[str], **attributes) -> bytes:
    out = b"".join(field(1, name.encode()) for name in inputs) + b"".join(field(2, name.encode()) for name in outputs)
    return out + field(4, kind.encode()) + b"".join(field(5, attribute(n, v)) for n, v in attributes.items())


def value_info(name: str, shape: tuple) -> bytes:
    dims = (field(1, size) if isinstance(size, int) else field(2, size.encode()) for size in shape)
    return field(1, name.encode()) + field(2, field(1, field(1, 1) + field(2, b"".join(field(1, d) for d in dims))))


def graph(nodes: list[bytes], tensors: list[bytes], inputs: Mapping[str, tuple] | None = None) -> bytes:
    parts = [*(field(1, one) for one in nodes), field(2, b"main"), *(field(5, one) for one in tensors)]
    return b"".join(parts + [field(11, value_info(name, shape)) for name, shape in (inputs or {}).items()])


def model(graph: bytes) -> bytes:
    return field(1, 8) + field(2, b"tests") + field(8, field(2, 17)) + field(7, graph)
