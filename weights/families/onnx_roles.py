"""The parameters of a GPT-2 in an ONNX graph by what its operations do with them, if names are lost or merged.

Exporters keep one of equal tensors, such as zero biases. Operations come in the model's order: two tables, whose sum is
the stream; twice in each layer a norm of the stream, two products, and their sum with the stream; a norm; a product if
the head is not the table.
"""

import re
from collections.abc import Iterator

from ..config import EMBEDDING, HEAD, POSITIONS
from ..containers.onnx import PRODUCTS, Graph, Node
from .family import MODULES

_SAME = ("Identity", "Cast", "Transpose")  # operations whose output is a tensor by another name
_VIEWS = ("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Dropout")  # that keep activations
_NORMS = {
    "LayerNormalization": 1,
    "SkipLayerNormalization": 2,
    "EmbedLayerNormalization": 5,
}  # place of the weight
_BIASED = {"SkipLayerNormalization": 4, "FastGelu": 1, "BiasGelu": 1}  # place of the product's bias before
_OF_MASKS = ("Where", "Concat")  # operations that may take another constant
_IS_NORM = [module.startswith("ln_") for module in MODULES]
_HALF = len(MODULES) // 2  # modules between two sums with the stream
STREAM, NORMED, INNER, OTHER = "stream", "normed", "inner", "other"


class _OtherModelError(Exception):
    """An operation that no plain GPT-2 has."""


class _Walk:
    """tables, and modules: whether it is a norm, and the names of weight and bias, in the order of operations."""

    def __init__(self, graph: Graph):
        self.tensors = graph.tensors
        self.tables: list[str] = []
        self.modules: list[tuple[bool, str, str | None]] = []
        self._names = {name: name for name in graph.tensors}
        self._values: dict[str, tuple[str, int]] = {}  # activations, and the number of modules before them
        for node in graph.nodes:
            self._take(node)

    def _take(self, node: Node) -> None:
        weights = [*map(self._names.get, node.inputs), *[None] * 7]
        values = [self._values[name] for name in node.inputs if name in self._values]
        if node.kind in _SAME and weights[0]:
            self._names |= dict.fromkeys(node.outputs, weights[0])
        elif node.kind == "Gather" and weights[0] and len(self.tensors[weights[0]].shape) == 2:
            self.tables.append(weights[0])
            self._values |= dict.fromkeys(node.outputs, (STREAM, 0))
        elif node.kind in _NORMS:
            self._take_norm(node, weights, values)
        elif (node.kind in PRODUCTS or node.kind == "Attention") and weights[1]:
            self._take_product(node, weights)
        elif values and node.kind != "Shape":
            self._values |= dict.fromkeys(node.outputs, self._made(node, weights, values))

    def _take_norm(self, node: Node, weights: list[str | None], values: list[tuple[str, int]]) -> None:
        if node.kind == "EmbedLayerNormalization":
            self.tables += filter(None, weights[2:4])
            stream = STREAM, 0
        else:
            self._add_bias(weights[_BIASED.get(node.kind, -1)])
            stream = self._sum(values)
        place = _NORMS[node.kind]
        weight = weights[place]
        if stream != (STREAM, len(self.modules)) or weight is None:
            raise _OtherModelError
        self.modules.append((True, weight, weights[place + 1]))
        self._values |= dict.fromkeys(node.outputs[1:], stream)
        self._values[node.outputs[0]] = NORMED, len(self.modules)

    def _take_product(self, node: Node, weights: list[str | None]) -> None:
        of, about = self._values.get(node.inputs[0]), node.attributes
        wanted = NORMED if self.modules and self.modules[-1][0] else INNER
        is_other = node.kind == "Attention" and (
            about.get("unidirectional") != 1 or about.get("do_rotary") or about.get("scale")
        )
        is_scaled = any(about.get(name, 1) != 1 for name in ("alpha", "beta")) or about.get("transA")
        if of != (wanted, len(self.modules)) or is_other or is_scaled:
            raise _OtherModelError
        self.modules.append((False, str(weights[1]), weights[2]))
        self._values |= dict.fromkeys(node.outputs, (INNER, len(self.modules)))

    def _made(self, node: Node, weights: list[str | None], values: list[tuple[str, int]]) -> tuple[str, int]:
        kinds = {kind for kind, _ in values}
        named = [self.tensors[name] for name in weights if name]
        has_weights = any(one.is_floating and max(one.shape, default=1) > 1 for one in named)
        if node.kind in _VIEWS:
            return values[0]
        if node.kind in _BIASED or (node.kind == "Add" and has_weights):
            self._add_bias(next(filter(None, weights), None), values)
            return values[0]
        if (has_weights and node.kind not in _OF_MASKS) or re.search("Rotary|Attention", node.kind):
            raise _OtherModelError
        if node.kind == "Add" and STREAM in kinds:
            return self._sum(values)
        return INNER if kinds == {INNER} else OTHER, max(step for _, step in values)

    def _sum(self, values: list[tuple[str, int]]) -> tuple[str, int]:
        """Return the stream: of tables, or the one before the last norm, and what was made since."""
        step = len(self.modules)
        is_stream = values in ([(STREAM, step)], [(STREAM, 0)] * 2) or sorted(values) == [
            (INNER, step),
            (STREAM, step - _HALF),
        ]
        return (STREAM if is_stream else OTHER), step

    def _add_bias(self, name: str | None, values: list[tuple[str, int]] | None = None) -> None:
        """Give the last product a bias, of whose output alone it is a part."""
        if name is None:
            return
        is_its = values in (None, [(INNER, len(self.modules))])
        if not is_its or not self.modules or self.modules[-1][0] or self.modules[-1][2]:
            raise _OtherModelError
        self.modules[-1] = (*self.modules[-1][:2], name)


def roles_of(graph: Graph) -> dict[str, str]:
    """Return names of tensors by parameter; none of another graph than a plain GPT-2's."""
    try:
        walk = _Walk(graph)
    except _OtherModelError:
        return {}
    modules = walk.modules
    head = modules.pop() if modules and not modules[-1][0] else None
    L, rest = divmod(len(modules) - 1, len(MODULES))
    is_plain = rest == 0 and [is_norm for is_norm, _, _ in modules] == [*_IS_NORM * L, True]
    if L < 1 or not is_plain or not head or head[2] or not all(bias for _, _, bias in modules):
        return {}
    names = [*(f"h.{layer}.{module}" for layer in range(L) for module in MODULES), "ln_f"]
    roles = dict(_tables(walk, head[1]))
    for module, (_, weight, bias) in zip(names, modules, strict=True):
        roles |= {f"{module}.weight": weight, f"{module}.bias": str(bias)}
    if head[1] != roles.get(EMBEDDING):
        roles[HEAD] = head[1]
    return roles if EMBEDDING in roles else {}


def _tables(walk: _Walk, head: str) -> Iterator[tuple[str, str]]:
    """Yield the embedding, which is the head's own or has its rows, and the positions, if that tells them apart."""
    V = max(walk.tensors[head].shape)
    likely = [name for name in walk.tables if name == head or walk.tensors[name].shape[0] == V]
    others = [name for name in walk.tables if name not in likely]
    if len(likely) == len(others) == 1:
        yield EMBEDDING, likely[0]
        yield POSITIONS, others[0]
