"""The parameters of a GPT-2 in an ONNX graph that onnxruntime's convert_to_onnx fused, by their operations.

Its optimizer keeps one of equal tensors, such as zero biases, so that names are lost. Only the exact chain is
known: a scale, another mask or another order would make another model.
"""

from dataclasses import replace

from ..config import EMBEDDING, POSITIONS
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


def roles_of(graph: Graph) -> dict[str, str]:
    """Return names by parameter, without the head; none for other graphs."""
    given = {*graph.inputs}
    nodes: list[Node] = []
    for node in graph.nodes:
        inputs, outputs = (*node.inputs, *[""] * 9), (*node.outputs, *[""] * 4)
        if node.kind == "Cast" and inputs[0] in given:
            given.add(outputs[0])
        else:
            nodes.append(replace(node, inputs=inputs, outputs=outputs))
    if (
        not nodes
        or nodes[0].kind != _TABLES
        or len(nodes) % len(_LAYER) != 2
        or not all(map(_is_plain, nodes))
    ):
        return {}
    ids, segments, *tables, segment_table, weight, bias, _, positions = nodes[0].inputs[:9]
    if segments or segment_table or not {ids, positions} <= given:
        return {}
    roles = {EMBEDDING: tables[0], POSITIONS: tables[1], "h.0.ln_1.weight": weight, "h.0.ln_1.bias": bias}
    last, stream = nodes[0].outputs[0], nodes[0].outputs[2]
    for i, node in enumerate(nodes[1:-1]):
        layer, place = divmod(i, len(_LAYER))
        kind, names = _LAYER[place]
        taken = (last, stream) if kind == _SUM else (last,)
        count = len(taken) + len(names)
        # A mask, and cached keys and values.
        more = node.inputs[count + 2 * (kind == "Attention") :]
        if node.kind != kind or node.inputs[: len(taken)] != taken or any(more):
            return {}
        ours = (name.format(layer, layer + 1) for name in names)
        roles |= dict(zip(ours, node.inputs[len(taken) : count], strict=True))
        last = node.outputs[0]
        stream = node.outputs[3] if kind == _SUM else stream
    L = len(nodes) // len(_LAYER)
    roles |= {f"ln_f.{kind}": roles.pop(f"h.{L}.ln_1.{kind}", "") for kind in ("weight", "bias")}
    head = nodes[-1]
    is_head = head.kind == "MatMul" and head.inputs[0] == last
    return roles if is_head and graph.tensors.keys() >= {*roles.values(), head.inputs[1]} else {}


def _is_plain(node: Node) -> bool:
    about = node.attributes
    is_causal = node.kind != "Attention" or about.get("unidirectional") == 1
    return is_causal and not (node.is_foreign or about.get("do_rotary") or about.get("scale"))
