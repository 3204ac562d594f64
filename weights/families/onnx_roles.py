"""The parameters of a GPT-2 in an ONNX graph that onnxruntime's convert_to_onnx fused, by their operations.

Its optimizer keeps one of equal tensors, such as zero biases, so that names are lost. Only the exact chain is
known: a scale, another mask or another order would make another model.
"""

from collections.abc import Iterator

from ..config import EMBEDDING, HEAD, POSITIONS
from ..containers.onnx import Graph, Node

_TABLES, _SUM = "EmbedLayerNormalization", "SkipLayerNormalization"
_PER_LAYER = 7  # operations
Step = tuple[str, dict[int, str]]  # an operation, and parameters by the place of its inputs


def _of(module: str, weight: int, bias: int) -> dict[int, str]:
    return {weight: f"{module}.weight", bias: f"{module}.bias"}


def _steps(n_layer: int) -> Iterator[Step]:
    yield _TABLES, {2: EMBEDDING, 3: POSITIONS, **_of("h.0.ln_1", 5, 6)}
    for layer in range(n_layer):
        h = f"h.{layer}"
        after = f"h.{layer + 1}.ln_1" if layer + 1 < n_layer else "ln_f"
        yield "Attention", _of(f"{h}.attn.c_attn", 1, 2)
        yield "MatMul", {1: f"{h}.attn.c_proj.weight"}
        yield _SUM, {**_of(f"{h}.ln_2", 2, 3), 4: f"{h}.attn.c_proj.bias"}
        yield "MatMul", {1: f"{h}.mlp.c_fc.weight"}
        yield "FastGelu", {1: f"{h}.mlp.c_fc.bias"}
        yield "MatMul", {1: f"{h}.mlp.c_proj.weight"}
        yield _SUM, {**_of(after, 2, 3), 4: f"{h}.mlp.c_proj.bias"}
    yield "MatMul", {1: HEAD}


def roles_of(graph: Graph) -> dict[str, str]:
    """Return names of tensors by parameter; none of another graph than a fused GPT-2's."""
    given = {name: name for name in graph.inputs}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.kind == "Cast" and node.inputs[0] in given:
            given[node.outputs[0]] = node.inputs[0]
        else:
            nodes.append(node)
    roles: dict[str, str] = {}
    last = stream = ""
    steps = list(_steps(len(nodes) // _PER_LAYER))
    for node, (kind, places) in zip(nodes, steps, strict=False):
        inputs = dict(enumerate(node.inputs))
        roles |= {parameter: inputs.pop(place, "") for place, parameter in places.items()}
        left = {place: name for place, name in inputs.items() if name}
        # Ids and a mask; a mask and cached keys and values; a sum has both.
        free = {_TABLES: {0, 7, 8}, "Attention": {3, 4}}.get(kind, set())
        taken = {} if kind == _TABLES else {0: last, 1: stream} if kind == _SUM else {0: last}
        others = {place: left.pop(place) for place in free & left.keys()}
        has_ids = kind != _TABLES or {others.get(0), others.get(8)} <= given.keys()
        if node.kind != kind or left != taken or not has_ids or not _is_plain(node):
            return {}
        last = node.outputs[0]
        if kind in (_TABLES, _SUM):
            stream = "".join(node.outputs[2 if kind == _TABLES else 3 :])
    are_all = len(nodes) == len(steps) > 2 and graph.tensors.keys() >= {*roles.values()}
    return roles if are_all else {}


def _is_plain(node: Node) -> bool:
    about = node.attributes
    is_causal = node.kind != "Attention" or about.get("unidirectional") == 1
    return is_causal and not about.get("do_rotary") and not about.get("scale")
