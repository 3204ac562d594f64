"""The parameters of a GPT-2 in an ONNX graph by what its operations do with them, if names are lost or merged.

Exporters keep one of equal tensors, such as zero biases. Operations come in the model's order: two tables, whose sum is
the stream; twice in each layer a norm of the stream, two products, and their sum with the stream; a norm; a product if
the head is not the table.
"""

import re
from dataclasses import dataclass

from ..config import EMBEDDING, HEAD, POSITIONS
from ..containers.onnx import PRODUCTS, Graph, Node
from .family import MODULES

_SAME = ("Identity", "Cast", "Transpose")  # operations whose output is a tensor by another name
_VIEWS = ("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Dropout")  # that keep activations
_OF_MASKS = ("Where", "Concat")  # that may take another constant
_NORMS = {
    "LayerNormalization": 1,
    "SkipLayerNormalization": 2,
    "EmbedLayerNormalization": 5,
}  # place of the weight
_BIASED = ("Add", "FastGelu", "BiasGelu")  # whose second input may be a bias
_IS_NORM = [module.startswith("ln_") for module in MODULES]
_HALF = len(MODULES) // 2  # modules between two sums with the stream
STREAM, NORMED, INNER, OTHER = "stream", "normed", "inner", "other"
Made = tuple[str, int]  # what an activation is, and the number of modules before it


class _OtherModelError(Exception):
    """An operation that no plain GPT-2 has."""


@dataclass
class _Module:
    is_norm: bool
    weight: str
    bias: str | None


class _Walk:
    """The tables and modules in the order of operations."""

    def __init__(self, graph: Graph):
        self.tensors = graph.tensors
        self.tables: list[str] = []
        self.modules: list[_Module] = []
        self._names = {name: name for name in graph.tensors}
        self._made: dict[str, Made] = {}
        for node in graph.nodes:
            self._take(node, [*map(self._names.get, node.inputs), *[None] * 7])

    def _take(self, node: Node, weights: list[str | None]) -> None:
        made = [self._made[name] for name in node.inputs if name in self._made]
        first = weights[0]
        if node.kind in _SAME and first:
            self._names |= dict.fromkeys(node.outputs, first)
        elif node.kind == "Gather" and first and len(self.tensors[first].shape) == 2:
            self.tables.append(first)
            self._made |= dict.fromkeys(node.outputs, (STREAM, 0))
        elif node.kind in _NORMS:
            self._take_norm(node, weights, made)
        elif (node.kind in PRODUCTS or node.kind == "Attention") and weights[1]:
            self._take_product(node, weights)
        elif made and node.kind != "Shape":
            self._made |= dict.fromkeys(node.outputs, self._result(node, weights, made))

    def _take_norm(self, node: Node, weights: list[str | None], made: list[Made]) -> None:
        if node.kind == "EmbedLayerNormalization":
            self.tables += filter(None, weights[2:4])
            made = [(STREAM, 0)]
        elif node.kind == "SkipLayerNormalization" and weights[4]:
            self._add_bias(weights[4])
        stream = self._sum(made)
        place = _NORMS[node.kind]
        if stream != (STREAM, len(self.modules)) or weights[place] is None:
            raise _OtherModelError
        self.modules.append(_Module(True, str(weights[place]), weights[place + 1]))
        self._made |= dict.fromkeys(node.outputs[1:], stream)
        self._made[node.outputs[0]] = NORMED, len(self.modules)

    def _take_product(self, node: Node, weights: list[str | None]) -> None:
        about = node.attributes
        of = NORMED if self.modules and self.modules[-1].is_norm else INNER
        is_other = node.kind == "Attention" and (
            about.get("unidirectional") != 1 or about.get("do_rotary") or about.get("scale")
        )
        is_scaled = any(about.get(name, 1) != 1 for name in ("alpha", "beta")) or about.get("transA")
        if self._made.get(node.inputs[0]) != (of, len(self.modules)) or is_other or is_scaled:
            raise _OtherModelError
        self.modules.append(_Module(False, str(weights[1]), weights[2]))
        self._made |= dict.fromkeys(node.outputs, (INNER, len(self.modules)))

    def _result(self, node: Node, weights: list[str | None], made: list[Made]) -> Made:
        named = [name for name in weights if name]
        tensors = [self.tensors[name] for name in named]
        has_weights = any(one.is_floating and max(one.shape, default=1) > 1 for one in tensors)
        if node.kind in _VIEWS:
            return made[0]
        if node.kind in _BIASED and has_weights and made == [(INNER, len(self.modules))]:
            self._add_bias(named[0])
            return made[0]
        if (has_weights and node.kind not in _OF_MASKS) or re.search("Rotary|Attention", node.kind):
            raise _OtherModelError
        kinds = {kind for kind, _ in made}
        if node.kind == "Add" and STREAM in kinds:
            return self._sum(made)
        return INNER if kinds == {INNER} else OTHER, max(step for _, step in made)

    def _sum(self, made: list[Made]) -> Made:
        """Return the stream: of tables, or the one before the last norm, and what was made since."""
        step = len(self.modules)
        parts = [(INNER, step), (STREAM, step - _HALF)]
        is_stream = made in ([(STREAM, step)], [(STREAM, 0)] * 2) or sorted(made) == parts
        return STREAM if is_stream else OTHER, step

    def _add_bias(self, name: str) -> None:
        """Give the last product a bias."""
        if not self.modules or self.modules[-1].is_norm or self.modules[-1].bias:
            raise _OtherModelError
        self.modules[-1].bias = name


def roles_of(graph: Graph) -> dict[str, str]:
    """Return names of tensors by parameter; none of another graph than a plain GPT-2's."""
    try:
        walk = _Walk(graph)
    except _OtherModelError:
        return {}
    L = len(walk.modules) // len(MODULES)
    if L < 1 or [module.is_norm for module in walk.modules] != [*_IS_NORM * L, True, False]:
        return {}
    *modules, head = walk.modules
    if head.bias or not all(module.bias for module in modules):
        return {}
    # The embedding is the head's own table, or has its rows.
    V = max(graph.tensors[head.weight].shape)
    likely = [name for name in walk.tables if name == head.weight or graph.tensors[name].shape[0] == V]
    others = [name for name in walk.tables if name not in likely]
    if not len(likely) == len(others) == 1:
        return {}
    roles = {EMBEDDING: likely[0], POSITIONS: others[0]}
    names = [*(f"h.{layer}.{module}" for layer in range(L) for module in MODULES), "ln_f"]
    for name, module in zip(names, modules, strict=True):
        roles |= {f"{name}.weight": module.weight, f"{name}.bias": str(module.bias)}
    return roles if head.weight == likely[0] else {**roles, HEAD: head.weight}
