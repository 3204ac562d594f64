"""The parameters of a GPT-2 in an ONNX graph that onnxruntime's convert_to_onnx fused, by their operations.

Its optimizer keeps one of equal tensors, such as zero biases, so that names are lost. Only the exact chain is
known: a scale, another mask or another order would make another model.
"""

from collections import deque
from dataclasses import replace

from ..config import EMBEDDING, HEAD, POSITIONS
from ..containers.onnx import Graph, Node

_TABLES, _SUM = "EmbedLayerNormalization", "SkipLayerNormalization"
# Operations, and their weights after the last output, and a sum's other part: {0} is the layer, {1} the next.
_LAYER = (
    ("Attention", ["h.{0}.attn.c_attn.weight", "h.{0}.attn.c_attn.bias"]),
    ("MatMul", ["h.{0}.attn.c_proj.weight"]),
    (_SUM, ["h.{0}.ln_2.weight", "h.{0}.ln_2.bias", "h.{0}.attn.c_proj.bias"]),
    ("MatMul", ["h.{0}.mlp.c_fc.weight"]),
    ("FastGelu", ["h.{0}.mlp.c_fc.bias"]),
    ("MatMul", ["h.{0}.mlp.c_proj.weight"]),
    (_SUM, ["h.{1}.ln_1.weight", "h.{1}.ln_1.bias", "h.{0}.mlp.c_proj.bias"]),
)


class _OtherGraphError(Exception):
    """A graph that is not the chain."""


def roles_of(graph: Graph) -> dict[str, str]:
    """Return names by parameter, without the head; none for other graphs."""
    try:
        return _roles(graph)
    except _OtherGraphError:
        return {}


def _roles(graph: Graph) -> dict[str, str]:
    chain = _Chain(graph)
    roles = chain.take_tables()
    L = len(chain.nodes) // len(_LAYER)
    for layer in range(L):
        for kind, names in _LAYER:
            roles |= chain.take(kind, [name.format(layer, layer + 1) for name in names])
    roles |= {f"ln_f.{kind}": roles.pop(f"h.{L}.ln_1.{kind}") for kind in ("weight", "bias")}
    head = chain.take("MatMul", [HEAD])
    _need(not chain.nodes and graph.tensors.keys() >= {*roles.values(), *head.values()})
    return roles


class _Chain:
    """Operations that are not taken yet, in order, of which each has the output of the one before."""

    def __init__(self, graph: Graph):
        self.inputs = {*graph.inputs}
        self.nodes: deque[Node] = deque()
        for node in graph.nodes:
            # As many as any operation of the chain may have.
            inputs = (*node.inputs, *[""] * 9)
            outputs = (*node.outputs, *[""] * 4)
            if node.kind == "Cast" and inputs[0] in self.inputs:
                self.inputs.add(outputs[0])
            else:
                self.nodes.append(replace(node, inputs=inputs, outputs=outputs))

    def take_tables(self) -> dict[str, str]:
        """Return names of the embeddings and the first layer norm."""
        node = self._next(_TABLES)
        ids, segments, wte, wpe, segment_table, weight, bias, _, positions = node.inputs[:9]
        _need(not segments and not segment_table and {ids, positions} <= self.inputs)
        self.last, _, self.stream, *_ = node.outputs
        return {EMBEDDING: wte, POSITIONS: wpe, "h.0.ln_1.weight": weight, "h.0.ln_1.bias": bias}

    def take(self, kind: str, names: list[str]) -> dict[str, str]:
        """Return names of the next operation's weights by parameter."""
        node = self._next(kind)
        before = (self.last, self.stream) if kind == _SUM else (self.last,)
        count = len(before) + len(names)
        # An attention may have a mask, and cached keys and values.
        others = node.inputs[count + 2 * (kind == "Attention") :]
        _need(node.inputs[: len(before)] == before and not any(others))
        self.last = node.outputs[0]
        if kind == _SUM:
            self.stream = node.outputs[3]
        return dict(zip(names, node.inputs[len(before) : count], strict=True))

    def _next(self, kind: str) -> Node:
        _need(bool(self.nodes))
        node = self.nodes.popleft()
        is_causal = kind != "Attention" or node.attributes.get("unidirectional") == 1
        is_foreign = node.is_foreign or node.attributes.get("do_rotary") or node.attributes.get("scale")
        _need(node.kind == kind and is_causal and not is_foreign)
        return node


def _need(is_so: bool) -> None:
    if not is_so:
        raise _OtherGraphError
