"""GPT-2 as ONNX: initialisers by the names of Hugging Face's model, and of the graph what no initialiser shows."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tinygpt.weights.checks import listed
from tinygpt.weights.config import ModelConfig
from tinygpt.weights.containers.mapped_file import StoredTensor
from tinygpt.weights.containers.onnx import PRODUCTS, Graph, Node
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.families.config_fields import checked_config
from tinygpt.weights.families.family import AS_IS, Family, NamedTensor, Rule, Source, transposed
from tinygpt.weights.families.gpt2 import model_config
from tinygpt.weights.families.infer_config import Shapes, ends_of, from_config_json, need_heads
from tinygpt.weights.parameters import EMBEDDING, HEAD, is_transposed, parameter_shapes
from tinygpt.weights.tensor import shortest

# Whatever stands before is a wrapper; merging two decoders into one file has left the end.
_NAME = re.compile(
    r"(?:.*[./])?(wte\.weight|wpe\.weight|ln_f\.(?:weight|bias)|lm_head\.weight|"
    r"h\.\d{1,6}\.(?:ln_[12]|attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.(?:weight|bias))(?:_merged_\d+)?"
)
_QUANTISED = re.compile(r".*(_quantized|_scale|_zero_point|_Q4|_Q4G\d*)")
_ACTIVATIONS = {"Tanh": "gelu_new", "FastGelu": "gelu_new", "Erf": "gelu", "BiasGelu": "gelu", "Relu": "relu"}
_QUANTIZED = {"MatMulNBits", "QAttention", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulInteger"}
_UNUSED = "of the graph: "
_MAX_CONSTANT = 1  # elements: what a graph computes with beside the weights


def _graph(source: Source) -> Graph:
    return source.container.graph


def _detect(source: Source) -> bool:
    return source.container.graph is not None


def _named(source: Source) -> Iterable[NamedTensor]:
    """A tensor in several branches of a graph is there once for each name."""
    there, head = set(), _head(source)
    for name, tensor in source.container.tensors.items():
        found = _NAME.fullmatch(name)
        if found and found[1] not in there:
            there.add(found[1])
            is_table = found[1] == HEAD and head is not None  # an embedding that was merged with the head it is tied to
            yield NamedTensor(EMBEDDING if is_table else found[1], name, tensor)
        elif name == head:
            yield NamedTensor(HEAD, name, tensor)
        else:
            is_constant = not tensor.is_floating or max(tensor.shape, default=1) <= _MAX_CONSTANT
            yield NamedTensor(_UNUSED + name if is_constant else name, name, tensor)


def _head(source: Source) -> str | None:
    """A tied head becomes a copy, transposed and without a name: (C, V) of what the last product multiplies by."""
    tensors = source.container.tensors
    names = {found[1]: name for name in tensors if (found := _NAME.fullmatch(name))}
    tables = [names[table] for table in (EMBEDDING, HEAD) if table in names]
    if len(tables) != 1:
        return None
    shape = tensors[tables[0]].shape[::-1]
    products = (node for node in reversed(_graph(source).nodes) if node.kind in PRODUCTS and len(node.inputs) > 1)
    heads = (node.inputs[1] for node in products if node.inputs[1] in tensors and node.inputs[1] not in names.values())
    return next((name for name in heads if tensors[name].shape == shape and tensors[name].is_floating), None)


def _config(source: Source) -> ModelConfig:
    _refuse_quantised(source)
    _refuse_foreign(source)
    _refuse_nameless(source)
    if (source.config_json or {}).get("model_type") == "gpt2":  # exporters copy it from the model
        return model_config(source.config_json, source.json("generation_config.json"))
    shapes = Shapes(source, _named(source))
    embedding = EMBEDDING if EMBEDDING in shapes else HEAD
    V = shapes.size(embedding, 0)
    values = {
        **ends_of(V),
        **from_config_json(source),
        **_seen(source),
        "vocab_size": V,
        "n_embd": shapes.size(embedding, 1),
        "n_positions": shapes.size("wpe.weight", 0),
        "n_inner": shapes.size("h.0.mlp.c_fc.bias", 0),
        "n_layer": shapes.layers(r"h\.(\d{1,6})\."),
    }
    need_heads(source, values)
    if "activation_function" not in values:
        raise CheckpointError(
            f"{source.path} computes its activation in a way that is not known: write a config.json beside it, such as "
            f'{{"n_head": {values["n_head"]}, "activation_function": "gelu_new"}}.'
        )
    return checked_config(values, described_by="its graph")


def _refuse_quantised(source: Source) -> None:
    kinds = {node.kind for node in _graph(source).nodes} & _QUANTIZED
    names = [name for name in source.container.tensors if _QUANTISED.fullmatch(name)]
    if kinds or names:
        raise CheckpointError(
            f"{source.path} is quantised ({listed([*sorted(kinds), *names], 3)}), which is not implemented in ONNX: "
            "export the model without, and give --dtype int8."
        )


def _refuse_foreign(source: Source) -> None:
    """A function may transpose what it is given."""
    graph = _graph(source)
    foreign = sorted({node.kind for node in graph.nodes if node.is_foreign and _takes_matrix(node, graph)})
    if foreign:
        raise CheckpointError(
            f"{source.path} gives weights to functions or operations of its own ({listed(foreign, 3)}), which is not "
            "implemented: inline functions, as onnx.inliner does, or export again."
        )


def _takes_matrix(node: Node, graph: Graph) -> bool:
    return any(name in graph.tensors and len(graph.tensors[name].shape) > 1 for name in node.inputs)


def _refuse_nameless(source: Source) -> None:
    names = source.container.tensors.keys()
    if not any(found and found[1].startswith("h.") for found in map(_NAME.fullmatch, names)):
        raise CheckpointError(
            f"{source.path} has no weights by the names of GPT-2's layers ({listed([*names], 3)}): it is another "
            "model, or its exporter has lost them, as it may where it folds constants. Export again without, or open "
            "what it was exported from."
        )


def _seen(source: Source) -> dict[str, Any]:
    """What operations show: heads, the activation, and the epsilon of layer norms."""
    graph, seen = _graph(source), {}
    sums = {node.outputs[0]: node for node in graph.nodes if node.kind == "Add" and node.outputs}
    for name, shape in graph.inputs.items():  # of what has been computed before: (B, H, T, D), or (2, B, H, T, D)
        axis = {4: 1, 5: 2}.get(len(shape))
        if name.startswith("past") and axis is not None and isinstance(shape[axis], int):
            seen["n_head"] = shape[axis]
    for node in graph.nodes:
        if node.kind == "Attention" and "num_heads" in node.attributes:
            seen["n_head"] = node.attributes["num_heads"]
        elif node.kind in ("LayerNormalization", "SkipLayerNormalization") and "epsilon" in node.attributes:
            seen["layer_norm_epsilon"] = shortest(node.attributes["epsilon"])
        elif node.kind == "Sqrt" and node.inputs and node.inputs[0] in sums:  # of a variance, and epsilon
            for name in sums[node.inputs[0]].inputs:
                tensor = source.container.tensors.get(name)
                if tensor is not None and tensor.is_floating and math.prod(tensor.shape) == 1:
                    seen["layer_norm_epsilon"] = shortest(tensor.float32().item())
        elif activation := _activation(node):
            seen["activation_function"] = activation
    return seen


def _activation(node: Node) -> str | None:
    if node.kind == "Gelu":
        return "gelu_new" if node.attributes.get("approximate") == "tanh" else "gelu"
    return _ACTIVATIONS.get(node.kind)


def _rules(source: Source, config: ModelConfig) -> dict[str, Rule]:
    """Matrices are (in, out) as in Hugging Face's model, unless an operation transposes what it is given."""
    turned = _transposed(_graph(source), source.container.tensors)
    file_names = {one.name: one.file_name for one in _named(source)}
    rules = {}
    for name in parameter_shapes(config):
        is_turned = is_transposed(name) and file_names.get(name) in turned
        if name == HEAD:
            is_turned = file_names.get(name) is not None and _NAME.fullmatch(file_names[name]) is None
        rules[name] = Rule((name,), transposed() if is_turned else AS_IS)
    return rules


def _transposed(graph: Graph, tensors: Mapping[str, StoredTensor]) -> set[str]:
    """Weights that lie (out, in)."""
    turned = set()
    for node in graph.nodes:
        if node.kind == "Transpose" and node.inputs and node.inputs[0] in tensors:
            turned.add(node.inputs[0])
        elif node.kind in PRODUCTS and len(node.inputs) > 1 and node.attributes.get("transB"):
            turned.add(node.inputs[1])
    return turned


def _quirks(source: Source, config: ModelConfig) -> list[str]:
    if "layer_norm_epsilon" in {**(source.config_json or {}), **_seen(source)}:
        return []
    return [f"layer_norm_epsilon is {config.layer_norm_epsilon}, as the graph does not show it"]


FAMILY = Family(
    name="GPT-2 of ONNX",
    described_by="its graph",
    detect=_detect,
    config=_config,
    rules=_rules,
    named=_named,
    is_ignored=lambda name: name.startswith(_UNUSED),
    quirks=_quirks,
    advice="Exporters may merge tensors that are equal, and one of two names is lost then: export a model in which no "
    "two are.",
)
