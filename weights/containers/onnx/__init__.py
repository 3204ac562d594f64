"""ONNX's files: the tensors in them or beside them, and of the graph what shows how a model is built.

Belongs here: what onnx.proto3 says. May import `container`, `mapped_file`, `peek` and `protobuf`.
"""
