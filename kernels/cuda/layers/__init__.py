"""The kernels of a step, one module for each kind of layer. May import packing and runtime."""
