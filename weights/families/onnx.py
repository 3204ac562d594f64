"""GPT-2 as ONNX: initializers by Hugging Face's names, and the graph for all that they do not show."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..config import EMBEDDING, HEAD, ModelConfig, is_transposed, parameter_shapes
from ..containers.onnx import PRODUCTS, Graph, Node
from ..errors import listed
from ..tensor import StoredTensor, shortest
from .family import (
    AS_IS,
    TRANSPOSED,
    Family,
    NamedTensor,
    Shapes,
    Source,
    TensorRule,
)
from .gpt2 import model_config
from .onnx_roles import roles_of
from .settings import checked_heads, config_of_parts

# Any prefix is a wrapper; merging two decoders into one file leaves the suffix.
_NAME = re.compile(
    r"(?:.*[./])?(wte\.weight|wpe\.weight|ln_f\.(?:weight|bias)|lm_head\.weight|"
    r"h\.\d{1,6}\.(?:ln_[12]|attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.(?:weight|bias))(?:_merged_\d+)?"
)
_QUANTIZED = re.compile(r".*(_quantized|_scale|_zero_point|_Q4|_Q4G\d*)")
_QUANTIZED_NODES = {
    "MatMulNBits",
    "QAttention",
    "DynamicQuantizeMatMul",
    "MatMulIntegerToFloat",
    "MatMulInteger",
}
_ACTIVATIONS = {"Tanh": "gelu_new", "FastGelu": "gelu_new", "Erf": "gelu", "BiasGelu": "gelu", "Relu": "relu"}
_UNUSED = "of the graph: "
_MAX_CONSTANT = 1  # elements of a constant that is no weight


def _named(source: Source) -> Iterable[NamedTensor]:
    """Yield all tensors; one in several branches of a graph has several names there."""
    seen, head = set(), _head(source)
    for name, tensor in source.container.tensors.items():
        match = _NAME.fullmatch(name)
        if match and match[1] not in seen:
            seen.add(match[1])
            # An embedding that was merged with its tied head.
            is_table = match[1] == HEAD and head is not None
            yield NamedTensor(EMBEDDING if is_table else match[1], name, tensor)
        elif name == head:
            yield NamedTensor(HEAD, name, tensor)
        else:
            is_constant = not tensor.is_floating or max(tensor.shape, default=1) <= _MAX_CONSTANT
            yield NamedTensor(_UNUSED + name if is_constant else name, name, tensor)
    for name, kept in roles_of(source.container.graph).items():
        # One of equal tensors, which has another's name, unless it is left out.
        if name not in seen and kept in source.container.tensors:
            yield NamedTensor(name, kept, source.container.tensors[kept])


def _head(source: Source) -> str | None:
    """Return a tied head's copy without a name: the (C, V) matrix of the last product."""
    tensors = source.container.tensors
    names = {match[1]: name for name in tensors if (match := _NAME.fullmatch(name))}
    tables = [names[table] for table in (EMBEDDING, HEAD) if table in names]
    if len(tables) != 1:
        return None
    shape = tensors[tables[0]].shape[::-1]
    nodes = reversed(source.container.graph.nodes)
    products = (node for node in nodes if node.kind in PRODUCTS and len(node.inputs) > 1)
    heads = (
        node.inputs[1]
        for node in products
        if node.inputs[1] in tensors and node.inputs[1] not in names.values()
    )
    return next((name for name in heads if tensors[name].shape == shape and tensors[name].is_floating), None)


def _config(source: Source) -> ModelConfig:
    _refuse(source, source.container.graph)
    said = _seen(source)
    if source.model_type == "gpt2":  # exporters copy it from the model
        config = model_config(source.beside, source.generation_json)
        checked_heads(source, said.get("n_head", config.n_head))
        return config
    shapes = Shapes(source, _named(source))
    embedding = EMBEDDING if EMBEDDING in shapes else HEAD
    seen = shapes.sizes(embedding, "wpe.weight", ("h.0.mlp.c_fc.bias", 0), r"h\.")
    if "activation_function" not in {**source.beside, **said}:
        raise source.error(
            "computes its activation in a way that is not known: write a config.json beside it, such as "
            '{"activation_function": "gelu_new"}.'
        )
    return config_of_parts(source, "its graph", seen=seen, said=said)


def _refuse(source: Source, graph: Graph) -> None:
    """Raise CheckpointError for quantized weights, functions that may transpose a matrix, and lost names."""
    names = list(source.container.tensors)
    quantized = sorted({node.kind for node in graph.nodes} & _QUANTIZED_NODES)
    quantized += [name for name in names if _QUANTIZED.fullmatch(name)]
    if quantized:
        raise source.error(
            f"is quantized ({listed(quantized, 3)}): export it without, and give --dtype int8."
        )
    matrices = {name for name, tensor in graph.tensors.items() if len(tensor.shape) > 1}
    foreign = {node.kind for node in graph.nodes if node.is_foreign and not matrices.isdisjoint(node.inputs)}
    if foreign:
        own = listed(sorted(foreign), 3)
        raise source.error(
            f"gives weights to functions or operations of its own ({own}): inline them by onnx.inliner."
        )
    if not any(match and match[1].startswith("h.") for match in map(_NAME.fullmatch, names)):
        there = listed(names, 3)
        raise source.error(
            f"has no weights by the names of GPT-2's layers ({there}): export with constants unfolded."
        )


def _seen(source: Source) -> dict[str, Any]:
    graph, seen = source.container.graph, {}
    sums = {node.outputs[0]: node for node in graph.nodes if node.kind == "Add" and node.outputs}
    for name, shape in graph.inputs.items():  # cached keys and values: (B, H, T, D), or (2, B, H, T, D)
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


def _rules(source: Source, config: ModelConfig) -> dict[str, TensorRule]:
    """Take matrices as (in, out), unless an operation transposes them."""
    turned = _transposed(source.container.graph, source.container.tensors)
    file_names = {one.name: one.file_name for one in _named(source)}
    rules = {}
    for name in parameter_shapes(config):
        is_turned = is_transposed(name) and file_names.get(name) not in turned
        if name == HEAD and name in file_names:
            is_turned = _NAME.fullmatch(file_names[name]) is None
        rules[name] = TensorRule((name,), TRANSPOSED if is_turned else AS_IS)
    return rules


def _transposed(graph: Graph, tensors: Mapping[str, StoredTensor]) -> set[str]:
    turned = set()
    for node in graph.nodes:
        if node.kind == "Transpose" and node.inputs and node.inputs[0] in tensors:
            turned.add(node.inputs[0])
        elif node.kind in PRODUCTS and len(node.inputs) > 1 and node.attributes.get("transB"):
            turned.add(node.inputs[1])
    return turned


def _quirks(source: Source, config: ModelConfig) -> list[str]:
    if "layer_norm_epsilon" in {**source.beside, **_seen(source)}:
        return []
    return [f"layer_norm_epsilon is {config.layer_norm_epsilon}, as the graph does not show it"]


FAMILY = Family(
    name="GPT-2 of ONNX",
    described_by="its graph",
    detect=lambda source: source.container.graph is not None,
    config=_config,
    rules=_rules,
    named=_named,
    ignored=(f"{_UNUSED}.*",),
    quirks=_quirks,
    advice="Exporters may merge tensors that are equal, and one of two names is lost then: export a model in which no "
    "two are.",
)
