"""The kernels of a step, a module for each kind of layer, and the records that they read (`formats.py`).

A name made by `by_type` stands for several functions: runtime/by_type.py says how. May import runtime, simd and jit.
"""
