"""Readers of file formats: the tensors in a file and how their elements are decoded. No reader knows a model."""
