"""What is kept of an ONNX graph: tensors, and the operations that show how a model is built."""

from dataclasses import dataclass, field
from typing import Any

from tinygpt.weights.containers.container import StoredTensor

# The kinds of nodes that are kept: those that show how a model is built, or how its weights lie. There may be any
# number of others, each of a few bytes.
PRODUCTS = {"Gemm", "MatMul", "FusedMatMul", "Transpose"}
QUANTISED = {"MatMulNBits", "QAttention", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulInteger"}
NORMS = {"LayerNormalization", "SkipLayerNormalization", "Add", "Sqrt"}
ACTIVATIONS = {"Tanh", "FastGelu", "Erf", "BiasGelu", "Gelu", "Relu"}
DOMAINS = {"", "ai.onnx", "com.microsoft"}  # of what is known here; all nodes of others are kept
KEPT = {"Identity", "Attention"} | PRODUCTS | QUANTISED | NORMS | ACTIVATIONS


@dataclass(frozen=True)
class Node:
    """An operation: what it is, the names that go in and come out, and its attributes that are numbers or texts.

    is_foreign: whether it is none of ONNX's or ONNX Runtime's, such as a function that the file itself defines.
    """

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    is_foreign: bool = False


@dataclass
class Graph:
    """Tensors and nodes of a graph and of all graphs in it, and the shapes of what goes in: sizes, names or None."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    inputs: dict[str, tuple] = field(default_factory=dict)
