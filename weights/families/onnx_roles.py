"""The parameters of a GPT-2 in a fused ONNX graph by their operations, if names are lost or merged.

onnxruntime's optimizer keeps one of equal tensors, such as zero biases. Its operations are one chain in the model's
order, next to a stream to which sums are added. Any other operation on them makes another model.
"""

import re

from ..config import EMBEDDING, HEAD, POSITIONS
from ..containers.onnx import PRODUCTS, Graph, Node
from .family import MODULES

_VIEWS = ("Identity", "Cast", "Dropout", "Reshape", "Squeeze", "Unsqueeze")
_LETTERS = {
    **{"Gather": "E", "LayerNormalization": "N", "SkipLayerNormalization": "S", "Attention": "A"},
    **dict.fromkeys(PRODUCTS, "M"),
    **dict.fromkeys(("FastGelu", "BiasGelu", "Gelu", "Relu"), "G"),
}
# B: a bias, +: a sum with the stream.
_GPT2 = re.compile(r"EE\+N(?:AMB?(?:\+N|S)MB?GMB?(?:\+N|S))+M")
_WEIGHTS = {"E": 0, "N": 1, "S": 2, "A": 1, "M": 1}  # places of weights, before their biases
_BIASES = {"G": 1, "S": 4}  # places of the last product's bias


class _OtherModelError(Exception):
    """An operation that no fused GPT-2 has."""


class _Walk:
    """The operations as letters, and the weights, biases and turned weights of tables, norms and products."""

    def __init__(self, graph: Graph):
        self.tensors, self.inputs = graph.tensors, graph.inputs
        self.letters = ""
        self.weights: list[str] = []
        self.biases: dict[int, str] = {}  # by place in weights
        self.turned: set[int] = set()
        self._activations: set[tuple] = set()
        self._known = {name: name for name in (*graph.tensors, *graph.inputs)}
        self._transposed: set[str] = set()
        self._stream = self._last = ""
        self._made: set[str] = set()  # of tables and what was made of them
        for node in graph.nodes:
            self._take(node, [*(self._known.get(name, name) for name in node.inputs), *[""] * 5])

    def _take(self, node: Node, inputs: list[str]) -> None:
        first, out = inputs[0], (*node.outputs, "")[0]
        if node.kind in _VIEWS or (node.kind == "Transpose" and first in self.tensors):
            self._known[out] = first
            if node.kind == "Transpose" or node.inputs[0] in self._transposed:
                self._transposed.add(out)
        elif self._made & {*inputs} or (node.kind == "Gather" and len(self._shape(first)) == 2):
            if node.kind != "Shape":
                self._apply(node, inputs, self._letter(node, inputs), out)

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape if name in self.tensors else ()

    def _letter(self, node: Node, inputs: list[str]) -> str:
        if node.kind == "Add":
            return "B" if any(name in self.tensors for name in inputs) else "+"
        return _LETTERS.get(node.kind, "?")

    def _apply(self, node: Node, inputs: list[str], letter: str, out: str) -> None:
        taken = [name for name in inputs if name in self._made]
        both = sorted([self._last, self._stream])
        wanted = {"E": [], "N": [self._stream], "+": both, "S": both}.get(letter, [self._last])
        if sorted(taken) != wanted or not self._is_plain(node, inputs, letter):
            raise _OtherModelError
        of_last = inputs[_BIASES.get(letter, -1)] or "".join({*inputs} & self.tensors.keys()) * (letter == "B")
        if of_last:
            self._add_bias(len(self.weights) - 1, of_last)
        if letter in _WEIGHTS:
            self._add(inputs, _WEIGHTS[letter], node)
        self.letters += letter
        self._made |= {*filter(None, node.outputs)}
        if letter == "S":
            self._stream = node.outputs[3]
        elif letter == "+" or not self._stream:
            self._stream = out
        self._last = out

    def _add(self, inputs: list[str], place: int, node: Node) -> None:
        if inputs[place] not in self.tensors:
            raise _OtherModelError
        number = len(self.weights)
        self.weights.append(inputs[place])
        if place and inputs[place + 1]:
            self._add_bias(number, inputs[place + 1])
        if node.attributes.get("transB") or node.inputs[place] in self._transposed:
            self.turned.add(number)

    def _add_bias(self, number: int, name: str) -> None:
        if name not in self.tensors or number in self.biases:
            raise _OtherModelError
        self.biases[number] = name

    def _is_plain(self, node: Node, inputs: list[str], letter: str) -> bool:
        """Return whether attributes and other inputs are GPT-2's."""
        about = node.attributes
        if letter == "E":
            return inputs[1] in self.inputs  # not computed, as positions from 2 on
        if letter == "A":
            has_more = any(about.get(name) for name in ("do_rotary", "scale")) or any(inputs[5:])
            return about.get("unidirectional") == 1 and not has_more
        if letter == "G":
            self._activations.add((node.kind, about.get("approximate")))
            return len(self._activations) == 1
        return all(about.get(name, 1) == 1 for name in ("alpha", "beta")) and not about.get("transA")


def roles_of(graph: Graph) -> dict[str, str]:
    """Return names of tensors by parameter; none of another graph than a fused GPT-2's."""
    try:
        walk = _Walk(graph)
    except _OtherModelError:
        return {}
    if not _GPT2.fullmatch(walk.letters):
        return {}
    tables, modules, head = walk.weights[:2], walk.weights[2:-1], walk.weights[-1]
    last = len(walk.weights) - 1
    if walk.turned - {last} or walk.biases.keys() != {*range(2, last)}:
        return {}
    # The embedding is the head's own table, or has its rows.
    V = graph.tensors[head].shape[0 if last in walk.turned else -1]
    likely = [name for name in tables if name == head or graph.tensors[name].shape[0] == V]
    others = [name for name in tables if name not in likely]
    if not len(likely) == len(others) == 1 or (head == likely[0] and not walk.turned):
        return {}
    roles = {EMBEDDING: likely[0], POSITIONS: others[0]}
    layers = range(walk.letters.count("A"))
    names = [*(f"h.{layer}.{module}" for layer in layers for module in MODULES), "ln_f"]
    for number, name in enumerate(names):
        roles |= {f"{name}.weight": modules[number], f"{name}.bias": walk.biases[number + 2]}
    return roles if head == likely[0] else {**roles, HEAD: head}
