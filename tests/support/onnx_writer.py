"""ONNX files by the package onnx: initialisers in every encoding, and a few nodes around them."""

from collections.abc import Mapping

import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, helper

node = helper.make_node


def tensor(name: str, array: np.ndarray, encoding: str = "raw", **external: object) -> TensorProto:
    """uint16 are bfloat16's bits. encoding: raw; listed (packed); or external, at a location, offset and length."""
    kind = helper.np_dtype_to_tensor_dtype(array.dtype) if array.dtype != np.uint16 else TensorProto.BFLOAT16
    made = TensorProto(name=name, data_type=kind, dims=array.shape)
    if encoding == "raw":
        made.raw_data = array.tobytes()
    elif encoding == "external":
        made.data_location = TensorProto.EXTERNAL
        for key, value in external.items():
            made.external_data.add(key=key, value=str(value))
    else:
        values = array.view(np.uint16) if array.itemsize == 2 else array
        field = {"float32": made.float_data, "float64": made.double_data}.get(
            array.dtype.name, made.int32_data
        )
        field.extend(values.ravel().tolist())
    return made


def graph(nodes: list, tensors: list[TensorProto], inputs: Mapping[str, tuple] | None = None) -> GraphProto:
    given = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (inputs or {}).items()
    ]
    return helper.make_graph(nodes, "main", given, [], tensors)


def model(graph: GraphProto, **more: list) -> bytes:
    made: ModelProto = helper.make_model(graph, **more)
    return made.SerializeToString()
