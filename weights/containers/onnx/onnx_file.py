"""ONNX: a graph whose initialisers are the weights, in the file or beside it. Nothing of the graph is run.

Format: onnx.proto3 of https://github.com/onnx/onnx. Read without the package `onnx`, where the bytes lie.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tinygpt.weights.containers.container import Container
from tinygpt.weights.containers.mapped_file import MappedFile
from tinygpt.weights.containers.onnx.graph import DOMAINS, KEPT, Graph, Node
from tinygpt.weights.containers.onnx.onnx_tensors import TensorReader, entry_of
from tinygpt.weights.containers.peek import Peek
from tinygpt.weights.containers.protobuf import Message, message, number
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.messages import shown

MAX_DEPTH = 8  # of graphs in nodes, such as the branches of an If


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
    except CheckpointError:
        raise
    except (ValueError, OverflowError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is a damaged ONNX file ({error}): export it again.") from error
    if not reader.graph.tensors:
        raise CheckpointError(f"{path} holds no weights: give another file.")
    return Container("ONNX", reader.graph.tensors, {**metadata, "graph": reader.graph})


class _Reader:
    def __init__(self, file: MappedFile):
        self.graph, self.tensors = Graph(), TensorReader(file)

    def read_model(self, model: Message) -> dict[str, str]:
        metadata = {}
        for field_number, value in model.fields():
            if field_number == 7:
                self._read_graph(message(value), 0)
            elif field_number == 14:
                metadata |= entry_of(message(value))
        self.tensors.check_total()
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
                name, tensor = self.tensors.read(message(value))
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
        _, tensor = self.tensors.read(content)
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
