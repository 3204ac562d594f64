"""The parameters of a GPT-2 in an ONNX graph by what its operations do with them, if names are lost or merged.

Exporters keep one of equal tensors, such as zero biases. Operations come in the model's order: two tables; in each
layer a norm, two products, a norm, two products; a norm; a product if the head is not the table.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..config import EMBEDDING, HEAD, POSITIONS
from ..containers.onnx import PRODUCTS, Graph, Node
from ..tensor import StoredTensor
from .family import MODULES

_SAME = ("Identity", "Cast", "Transpose")  # operations whose output is a tensor by another name
_NORMS = {
    "LayerNormalization": 1,
    "SkipLayerNormalization": 2,
    "EmbedLayerNormalization": 5,
}  # place of the weight
_BIASED = {"SkipLayerNormalization": 4, "FastGelu": 1, "BiasGelu": 1}  # place of the product's bias before
_IS_NORM = [module.startswith("ln_") for module in MODULES]


@dataclass
class _Found:
    """Names of tensors in the order of operations. layers: weight and bias of each norm and product."""

    tables: list[str] = field(default_factory=list)
    layers: list[tuple[bool, str, str | None]] = field(default_factory=list)
    head_of: str | None = None

    def add_bias(self, name: str | None) -> bool:
        """Give the last product a bias. Return whether it is one without."""
        if not self.layers or self.layers[-1][0] or self.layers[-1][2]:
            return name is None
        self.layers[-1] = (*self.layers[-1][:2], name)
        return True


def roles_of(graph: Graph) -> dict[str, str]:
    """Return names of tensors by parameter; none of another graph than a plain GPT-2's."""
    found = _walked(graph)
    if found is None or len(found.tables) != 2 or _has_norms_after(graph):
        return {}
    last_is_head = bool(found.layers) and not found.layers[-1][0]
    head = found.layers.pop() if last_is_head else None
    *layers, last = found.layers or [(False, "", None)]
    L, rest = divmod(len(layers), len(MODULES))
    is_plain = last[0] and not rest and [is_norm for is_norm, _, _ in layers] == _IS_NORM * L
    if not L or not is_plain or (head and head[2]) or not all(bias for _, _, bias in (*layers, last)):
        return {}
    modules = [f"h.{layer}.{module}" for layer in range(L) for module in MODULES]
    roles = dict(_tables(found, head[1] if head else None, graph.tensors))
    for module, (_, weight, bias) in zip([*modules, "ln_f"], [*layers, last], strict=True):
        roles |= {f"{module}.weight": weight, f"{module}.bias": str(bias)}
    if head and head[1] != roles.get(EMBEDDING):
        roles[HEAD] = head[1]
    return roles if EMBEDDING in roles else {}


def _walked(graph: Graph) -> _Found | None:
    """Return what the operations use; None if one uses a tensor in a way that no GPT-2 has."""
    found = _Found()
    names = {name: name for name in graph.tensors}
    for node in graph.nodes:
        given = [names.get(name) for name in node.inputs]
        if node.kind in _SAME and given and given[0]:
            names |= dict.fromkeys(node.outputs, given[0])
        elif node.kind in _NORMS:
            if not _add_norm(found, node, given):
                return None
        elif node.kind in PRODUCTS or node.kind == "Attention":
            if len(given) > 1 and given[1] and not _add_product(found, node, given):
                return None
        elif node.kind == "Gather" and given[:1] and given[0] and _is_table(graph.tensors[given[0]]):
            found.tables.append(given[0])
        elif node.kind in (*_BIASED, "Add"):
            vectors = [name for name in given if name and len(graph.tensors[name].shape) == 1]
            if len(vectors) > 1 or (vectors and not found.add_bias(vectors[0])):
                return None
    return found


def _add_norm(found: _Found, node: Node, given: list[str | None]) -> bool:
    place = _NORMS[node.kind]
    padded = [*given, *[None] * 7]
    if node.kind == "EmbedLayerNormalization":
        found.tables += [name for name in padded[2:4] if name]
    bias = padded[_BIASED[node.kind]] if node.kind in _BIASED else None
    weight, shift = padded[place : place + 2]
    is_known = (bias is None or found.add_bias(bias)) and weight is not None
    if weight is not None:
        found.layers.append((True, weight, shift))
    return is_known


def _add_product(found: _Found, node: Node, given: list[str | None]) -> bool:
    attributes = node.attributes
    is_other = node.kind == "Attention" and (
        attributes.get("unidirectional") != 1 or attributes.get("do_rotary") or attributes.get("scale")
    )
    is_scaled = any(attributes.get(name, 1) != 1 for name in ("alpha", "beta"))
    found.layers.append(
        (False, str(given[1]), given[2] if len(given) > 2 and node.kind != "FusedMatMul" else None)
    )
    return not is_other and not is_scaled


def _is_table(tensor: StoredTensor) -> bool:
    return tensor.is_floating and len(tensor.shape) == 2


def _tables(
    found: _Found, head: str | None, tensors: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, str]]:
    """Yield the embedding, which is the head's own or has its rows, and the positions, if that tells them apart."""
    V = max(tensors[head].shape) if head else 0
    likely = [name for name in found.tables if name == head or (head and tensors[name].shape[0] == V)]
    if len(likely) == 1 and head:
        (other,) = (name for name in found.tables if name != likely[0])
        yield EMBEDDING, likely[0]
        yield POSITIONS, other


def _has_norms_after(graph: Graph) -> bool:
    """Return whether a residual is added to a norm's output, as in models whose norms come after their blocks."""
    normed = {node.outputs[0] for node in graph.nodes if node.kind in _NORMS and node.outputs}
    sums = (node for node in graph.nodes if node.kind in ("Add", "SkipLayerNormalization"))
    return any(not normed.isdisjoint(node.inputs[:2]) for node in sums)
