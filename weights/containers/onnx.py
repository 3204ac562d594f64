"""ONNX: a graph whose initializers are the weights, in the file or in mapped files next to it. The graph never runs."""

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from ..errors import CheckpointError, how_to_install, shown
from ..files import check_inside
from ..tensor import (
    ITEMSIZE,
    Container,
    MappedFile,
    StoredTensor,
    contiguous_strides,
    is_possible_shape,
    parsing,
)

DTYPES = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}  # by ONNX's numbers
EXTERNAL = 1  # a tensor's data_location, if it lies in another file
MAX_SHARING = 100  # of a file's bytes, by all tensors in it
PRODUCTS = {"MatMul", "Gemm", "FusedMatMul"}  # operations whose second input may be a matrix of weights
DOMAINS = {"", "ai.onnx", "com.microsoft"}  # of operations, not of a file's own functions


@dataclass(frozen=True)
class Node:
    """An operation. is_foreign: of another domain."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    is_foreign: bool


@dataclass(frozen=True)
class Graph:
    """The tensors and operations of a graph and its subgraphs. inputs: shapes by name, None for a free size."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    inputs: dict[str, tuple] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InlineTensor(StoredTensor):
    """A tensor in the graph itself, in an onnx.TensorProto."""

    name: str
    proto: Any = field(compare=False)

    def float32(self) -> np.ndarray:
        from onnx import numpy_helper

        with parsing(self.path, f"ONNX file at {shown(self.name)}"):
            return np.asarray(numpy_helper.to_array(self.proto)).astype(np.float32).reshape(self.shape)

    def release(self) -> None:
        """Keep the graph, which is in memory as a whole."""


def read_onnx(path: Path) -> Container:
    """Return initializers and Graph. Raise CheckpointError if a file is damaged or leaves its folder."""
    try:
        import onnx
    except ImportError as error:
        raise CheckpointError(
            f"{path} is an ONNX file, which needs onnx: {how_to_install('onnx')}."
        ) from error
    file = MappedFile(path)
    with parsing(path, "ONNX file", Exception):  # protobuf's errors differ with its implementation
        model = onnx.load_model_from_string(file.data[:])
    file.release()
    reader = _Reader(file)
    with parsing(path, "ONNX file", TypeError):  # protobuf returns a text that is not UTF-8 as bytes
        reader.read_graph(model.graph)
        for other in reader.files.values():
            if (claimed := reader.claimed[other]) > MAX_SHARING * len(other):
                raise ValueError(f"its tensors claim {claimed} bytes of {len(other)}")
    graph = reader.graph
    if not graph.tensors:
        raise CheckpointError(f"{path} holds no weights: give another file.")
    # Exporters merge equal tensors: all but one are outputs of an Identity.
    for node in graph.nodes:
        if node.kind == "Identity" and node.inputs and node.inputs[0] in graph.tensors:
            for name in node.outputs:
                graph.tensors.setdefault(name, graph.tensors[node.inputs[0]])
    return Container("ONNX", graph.tensors, graph=graph)


class _Reader:
    def __init__(self, file: MappedFile):
        self.file, self.graph = file, Graph()
        self.files: dict[Path, MappedFile] = {}
        self.claimed: Counter[MappedFile] = Counter()

    def read_graph(self, graph: Any) -> None:
        for tensor in graph.initializer:
            if str(tensor.name) in self.graph.tensors:
                raise ValueError(f"two initializers {shown(tensor.name)}")
            self.graph.tensors[str(tensor.name)] = self._tensor(tensor)
        for info in graph.input:
            sizes = [
                size.dim_value if size.HasField("dim_value") else None
                for size in info.type.tensor_type.shape.dim
            ]
            self.graph.inputs.setdefault(str(info.name), tuple(sizes))
        for node in graph.node:
            self._read_node(node)

    def _read_node(self, node: Any) -> None:
        attributes: dict[str, Any] = {}
        inputs, outputs = (tuple(map(str, names)) for names in (node.input, node.output))
        for attribute in node.attribute:
            if attribute.HasField("t"):  # of a Constant: an initializer by another name
                if outputs and outputs[0] not in self.graph.tensors:
                    self.graph.tensors[outputs[0]] = self._tensor(attribute.t)
            elif attribute.HasField("f"):
                attributes[attribute.name] = attribute.f
            elif attribute.HasField("i"):
                attributes[attribute.name] = attribute.i
            elif attribute.HasField("s"):
                attributes[attribute.name] = attribute.s.decode("utf-8", "replace")
            for graph in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                self.read_graph(graph)
        self.graph.nodes.append(
            Node(str(node.op_type), inputs, outputs, attributes, node.domain not in DOMAINS)
        )

    def _tensor(self, proto: Any) -> StoredTensor:
        shape = tuple(proto.dims)
        dtype = DTYPES.get(proto.data_type, f"ONNX type {proto.data_type}")
        if not is_possible_shape(shape):
            raise ValueError(f"an impossible shape of {shown(proto.name)}")
        strides = contiguous_strides(shape)
        if dtype not in ITEMSIZE:
            return StoredTensor(self.file, dtype, shape, strides, 0)  # never read
        size = math.prod(shape) * ITEMSIZE[dtype]
        if proto.data_location == EXTERNAL:
            external = {entry.key: entry.value for entry in proto.external_data}
            file, begin, there = self._external(proto.name, external, size)
            self.claimed[file] += size
            tensor = StoredTensor(file, dtype, shape, strides, begin)
        else:
            there = _inline_size(proto, dtype)
            tensor = InlineTensor(self.file, dtype, shape, strides, 0, proto.name, proto)
        if there != size:
            raise ValueError(f"{shown(proto.name)} of shape {shape} has {there} bytes and needs {size}")
        return tensor

    def _external(self, name: str, external: dict[str, str], size: int) -> tuple[MappedFile, int, int]:
        location = external.get("location", "")
        path = PurePosixPath(location)
        is_relative = location and not (
            path.is_absolute() or PureWindowsPath(location).drive or "\\" in location
        )
        if not is_relative or ".." in path.parts:
            raise CheckpointError(
                f"{self.file.path} keeps weights in {shown(location)}, which is no file of its folder: refused. Export "
                "it again."
            )
        target = self.file.path.parent / path  # one file, however its location is spelt
        if target not in self.files:
            with parsing(target, "file"):
                check_inside(target, self.file.path.parent)
            self.files[target] = MappedFile(target)
        file = self.files[target]
        begin = _decimal(external.get("offset", "0"))
        there = _decimal(external["length"]) if "length" in external else size
        if begin + there > len(file):
            raise CheckpointError(
                f"{file.path} has {len(file)} bytes, and {shown(name)} reaches to byte {begin + there}: copy it again."
            )
        return file, begin, there


def _inline_size(proto: Any, dtype: str) -> int:
    if proto.HasField("raw_data"):
        return len(proto.raw_data)
    values = {"float32": proto.float_data, "float64": proto.double_data}.get(dtype, proto.int32_data)
    return len(values) * ITEMSIZE[dtype]


def _decimal(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise ValueError(f"a place {shown(text)}")
    return int(text)
