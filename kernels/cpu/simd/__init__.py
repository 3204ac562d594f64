"""Micro-kernels in LLVM vector IR: tiles of products, loads, stores and sums of vectors. May import jit alone."""
