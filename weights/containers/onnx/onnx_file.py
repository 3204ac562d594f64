"""ONNX: a graph whose initialisers are the weights, in the file or beside it. Nothing of the graph is run.

Format: onnx.proto3 of https://github.com/onnx/onnx. Read without the package `onnx`, where the bytes lie.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from tinygpt.errors import CheckpointError
from tinygpt.weights.containers.container import Container, StoredTensor
from tinygpt.weights.containers.mapped_file import (
    MAX_DIMENSIONS,
    MAX_SIZE,
    MappedFile,
    MappedTensor,
    contiguous_strides,
)
from tinygpt.weights.containers.peek import Peek
from tinygpt.weights.containers.protobuf import Message, message, number, numbers_of
from tinygpt.weights.messages import shown

# ONNX's numbers of the dtypes that can be read, with their sizes in bytes.
DTYPES = {1: ("float32", 4), 10: ("float16", 2), 11: ("float64", 8), 16: ("bfloat16", 2)}
FLOATS, INT32S, DOUBLES = 4, 5, 10  # fields of a tensor for elements one by one; halves are bits among INT32S
MAX_SHARING = 100  # of a file's bytes, by all tensors in it: several may be one
MAX_DEPTH = 8  # of graphs in nodes, such as the branches of an If
EXTERNAL = 1
# The kinds of nodes that are kept: those that show how a model is built, or how its weights lie. There may be any
# number of others, each of a few bytes.
PRODUCTS = {"Gemm", "MatMul", "FusedMatMul", "Transpose"}
QUANTISED = {"MatMulNBits", "QAttention", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulInteger"}
NORMS = {"LayerNormalization", "SkipLayerNormalization", "Add", "Sqrt"}
ACTIVATIONS = {"Tanh", "FastGelu", "Erf", "BiasGelu", "Gelu", "Relu"}
DOMAINS = {"", "ai.onnx", "com.microsoft"}  # of what is known here; all nodes of others are kept
KEPT = {"Identity", "Attention"} | PRODUCTS | QUANTISED | NORMS | ACTIVATIONS


@dataclass(frozen=True)
class Node:
    """An operation: what it is, the names that go in and come out, and its attributes that are numbers or texts.

    is_foreign: whether it is none of ONNX's or ONNX Runtime's, such as a function that the file itself defines.
    """

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    is_foreign: bool = False


@dataclass
class Graph:
    """Tensors and nodes of a graph and of all graphs in it, and the shapes of what goes in: sizes, names or None."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    inputs: dict[str, tuple] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ListedTensor:
    """A StoredTensor whose elements stand one by one in a message."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    elements: tuple[Message | int, ...]
    is_floating = True

    @property
    def nbytes(self) -> int:
        return sum(len(element) if isinstance(element, Message) else 1 for element in self.elements)

    def float32(self) -> np.ndarray:
        """Of floats, packed; or of bits of halves, which are numbers."""
        if self.dtype in ("float32", "float64"):
            kind = np.dtype(self.dtype).newbyteorder("<")
            data = b"".join(element.bytes() for element in self.elements)
            return np.frombuffer(data, kind).astype(np.float32).reshape(self.shape)
        bits = _bits(self.elements)
        if self.dtype == "float16":
            return bits.astype(np.uint16).view(np.float16).astype(np.float32).reshape(self.shape)
        return (bits.astype(np.uint32) << 16).view(np.float32).reshape(self.shape)

    def release(self) -> None:
        """They are in a copy."""


def _bits(elements: Sequence[Message | int]) -> np.ndarray:
    """Numbers one by one, or packed, or both."""
    arrays = [element.varint_array() if isinstance(element, Message) else [element] for element in elements]
    return np.concatenate([np.empty(0, np.uint64), *(np.array(array, np.uint64) for array in arrays)])


def is_onnx(peek: Peek) -> bool:
    """The first field is the version of the format, a small number. Then comes who wrote it, the graph or operators."""
    return (
        len(peek.head) > 8
        and peek.head[0] == 0x08
        and peek.head[1] < 0x80
        and peek.head[2] in (0x12, 0x1A, 0x22, 0x28, 0x3A)
    )


def read_onnx(path: Path) -> Container:
    """The initialisers. The metadata are what stands in ONNX's, and under "graph" the Graph.

    Raises CheckpointError when a file is damaged, or refers to one outside its folder.
    """
    file = MappedFile(path)
    reader = _Reader(file)
    try:
        metadata = reader.read_model(Message(memoryview(file.data), 0, len(file)))
    except (ValueError, OverflowError, UnicodeDecodeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is a damaged ONNX file ({error}): export it again.") from error
    if not reader.graph.tensors:
        raise CheckpointError(f"{path} holds no weights: give another file.")
    return Container("ONNX", reader.graph.tensors, {**metadata, "graph": reader.graph})


class _Reader:
    def __init__(self, file: MappedFile):
        self.file, self.graph = file, Graph()
        self.files: dict[str, MappedFile] = {}
        self.claimed: dict[str, tuple[MappedFile, int]] = {}  # bytes of all tensors in each file

    def read_model(self, model: Message) -> dict[str, str]:
        metadata = {}
        for field_number, value in model.fields():
            if field_number == 7:
                self._read_graph(message(value), 0)
            elif field_number == 14:
                entry = {n: message(part).text() for n, part in message(value).fields()}
                metadata[entry.get(1, "")] = entry.get(2, "")
        for file, claimed in self.claimed.values():
            if claimed > MAX_SHARING * len(file):
                raise ValueError(f"its tensors claim {claimed} bytes of {len(file)}")
        self._follow_identities()
        return metadata

    def _follow_identities(self) -> None:
        """Exporters merge tensors that are equal: the others are what an Identity makes of the one that is kept."""
        for node in self.graph.nodes:
            if node.kind == "Identity" and node.inputs and node.inputs[0] in self.graph.tensors:
                for name in node.outputs:
                    self.graph.tensors.setdefault(name, self.graph.tensors[node.inputs[0]])

    def _read_graph(self, graph: Message, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise ValueError("graphs in graphs without end")
        for field_number, value in graph.fields():
            if field_number == 1:
                self._read_node(message(value), depth)
            elif field_number == 5:
                name, tensor = self._tensor(message(value))
                if name in self.graph.tensors:
                    raise ValueError(f"two initialisers {shown(name)}")
                self.graph.tensors[name] = tensor
            elif field_number == 11:
                name, shape = _input(message(value))
                self.graph.inputs.setdefault(name, shape)

    def _read_node(self, node: Message, depth: int) -> None:
        names: dict[int, list[str]] = {1: [], 2: []}
        kind, domain, attributes = "", "", {}
        for field_number, value in node.fields():
            if field_number in names:
                names[field_number].append(message(value).text())
            elif field_number == 4:
                kind = message(value).text()
            elif field_number == 7:
                domain = message(value).text()
            elif field_number == 5:
                name, content = self._attribute(message(value), depth)
                if isinstance(content, Message):
                    self._constant(names[2], content)
                elif content is not None:
                    attributes[name] = content
        is_foreign = domain not in DOMAINS
        if kind in KEPT or is_foreign:
            self.graph.nodes.append(Node(kind, tuple(names[1]), tuple(names[2]), attributes, is_foreign))

    def _constant(self, outputs: list[str], content: Message) -> None:
        """A tensor in a Constant node is an initialiser by another name."""
        _, tensor = self._tensor(content)
        if outputs and outputs[0] not in self.graph.tensors:
            self.graph.tensors[outputs[0]] = tensor

    def _attribute(self, attribute: Message, depth: int) -> tuple[str, Any]:
        name, content = "", None
        for field_number, value in attribute.fields():
            if field_number == 1:
                name = message(value).text()
            elif field_number == 2:  # a float
                content = float(np.uint32(number(value)).view(np.float32))
            elif field_number == 3:
                content = number(value)
            elif field_number == 4 and len(message(value)) < 1000:
                content = str(message(value).bytes(), "utf-8", "replace")
            elif field_number == 5:
                content = message(value)
            elif field_number in (6, 11):  # graphs
                self._read_graph(message(value), depth + 1)
        return name, content

    def _tensor(self, tensor: Message) -> tuple[str, StoredTensor]:
        shape: list[int] = []
        name, kind, raw, external, is_external = "", 0, None, {}, False
        elements: dict[int, list[Message | int]] = {}
        for field_number, value in tensor.fields():
            if field_number == 1:
                shape += numbers_of(value)
            elif field_number == 2:
                kind = number(value)
            elif field_number in (FLOATS, INT32S, DOUBLES):
                elements.setdefault(field_number, []).append(value)
            elif field_number == 8:
                name = message(value).text()
            elif field_number == 9:
                raw = message(value)
            elif field_number == 13:
                entry = {n: message(part).text() for n, part in message(value).fields()}
                external[entry.get(1)] = entry.get(2, "")
            elif field_number == 14:
                is_external = number(value) == EXTERNAL
        if len(shape) > MAX_DIMENSIONS or any(size > MAX_SIZE for size in shape):
            raise ValueError(f"an impossible shape of {shown(name)}")
        return name, self._place(name, kind, tuple(shape), raw, external if is_external else None, elements)

    def _place(
        self,
        name: str,
        kind: int,
        shape: tuple[int, ...],
        raw: Message | None,
        external: dict[str, str] | None,
        elements: dict[int, list],
    ) -> StoredTensor:
        dtype, itemsize = DTYPES.get(kind, (f"ONNX type {kind}", 0))
        if not itemsize:
            return MappedTensor(self.file, dtype, shape, contiguous_strides(shape), 0)  # which nobody reads
        size = math.prod(shape) * itemsize
        if external is not None:
            file, start, there = self._external(name, external, size)
        elif raw is not None:
            file, start, there = self.file, raw.start, len(raw)
        else:
            return self._listed(name, dtype, shape, elements)
        if there != size:
            raise ValueError(f"{shown(name)} of shape {shape} has {there} bytes and needs {size}")
        _, claimed = self.claimed.get(str(file.path), (file, 0))
        self.claimed[str(file.path)] = file, claimed + size
        return MappedTensor(file, dtype, shape, contiguous_strides(shape), start)

    def _listed(self, name: str, dtype: str, shape: tuple[int, ...], elements: dict[int, list]) -> ListedTensor:
        kind = {"float32": FLOATS, "float64": DOUBLES}.get(dtype, INT32S)
        values = elements.get(kind, [])
        is_half = True
        if kind == INT32S:
            bits = _bits(values)
            count, is_half = len(bits), not (bits > 0xFFFF).any()
        else:  # floats are packed; one by one they are numbers, which exporters do not write
            count = sum(len(message(value)) for value in values) // (4 if kind == FLOATS else 8)
        if count != math.prod(shape) or not is_half:
            raise ValueError(f"{shown(name)} of shape {shape} has {count} elements")
        return ListedTensor(self.file.path, dtype, shape, tuple(values))

    def _external(self, name: str, external: dict[str, str], size: int) -> tuple[MappedFile, int, int]:
        """The file beside this one, and where in it a tensor lies."""
        location = external.get("location", "")
        path = PurePosixPath(location)
        is_relative = location and not (path.is_absolute() or PureWindowsPath(location).drive or "\\" in location)
        if not is_relative or ".." in path.parts:
            raise CheckpointError(
                f"{self.file.path} keeps weights in {shown(location)}, which is no file of its folder: refused. Export "
                "it again."
            )
        if location not in self.files:
            folder = self.file.path.parent
            target = folder / path
            if not any(target.resolve().is_relative_to(place) for place in _places(folder)):
                raise CheckpointError(f"{target}, where {self.file.path} keeps weights, is a link: refused.")
            self.files[location] = MappedFile(target)
        file, begin = self.files[location], _decimal(external.get("offset", "0"))
        there = _decimal(external["length"]) if "length" in external else size
        if begin + there > len(file):
            raise CheckpointError(
                f"{file.path} has {len(file)} bytes, and {shown(name)} reaches to byte {begin + there}: copy it again."
            )
        return file, begin, there


def _places(folder: Path) -> list[Path]:
    """Where what lies in a folder may be: there, or among the blobs to which the Hub's cache links from snapshots."""
    folder = folder.absolute()
    blobs = [parent.parent / "blobs" for parent in folder.parents if parent.name == "snapshots"]
    return [place.resolve() for place in (folder, *blobs)]


def _decimal(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise ValueError(f"a place {shown(text)}")
    return int(text)


def _input(info: Message) -> tuple[str, tuple]:
    """Name and shape of what goes into a graph."""
    name, shape = "", ()
    for field_number, value in info.fields():
        if field_number == 1:
            name = message(value).text()
        elif field_number == 2:
            for tensor in _inside(message(value), 1):
                for sizes in _inside(tensor, 2):
                    shape = tuple(_size(size) for size in _inside(sizes, 1))
    return name, shape


def _inside(outer: Message, wanted: int) -> Iterator[Message]:
    return (message(value) for field_number, value in outer.fields() if field_number == wanted)


def _size(dimension: Message) -> int | str | None:
    for field_number, value in dimension.fields():
        return number(value) if field_number == 1 else message(value).text()
    return None
