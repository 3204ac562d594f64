"""The activations between c_fc and c_proj, by the names of kernels/reference/layers.py; none overflows."""

import math

from tinygpt.kernels.cuda.runtime.jit import device_function

from numba import float32  # isort: skip


@device_function
def _sigmoid(x):
    """1 / (1 + exp(-x)), of whichever exponential is small."""
    small = math.exp(-abs(x))
    return (float32(1) if x >= float32(0) else small) / (float32(1) + small)


@device_function
def gelu_tanh(x):
    """0.5 x (1 + tanh(y)) is x times the sigmoid of 2 y."""
    return x * _sigmoid(float32(1.5957691216057308) * (x + float32(0.044715) * x * x * x))


@device_function
def gelu(x):
    return float32(0.5) * x * (float32(1) + math.erf(x * float32(0.7071067811865476)))


@device_function
def quick_gelu(x):
    return x * _sigmoid(float32(1.702) * x)


@device_function
def silu(x):
    return x * _sigmoid(x)


@device_function
def relu(x):
    return x if x > float32(0) or x != x else float32(0)


@device_function
def tanh(x):
    return math.tanh(x)


ACTIVATIONS = {
    "gelu_tanh": gelu_tanh,
    "gelu": gelu,
    "quick_gelu": quick_gelu,
    "relu": relu,
    "silu": silu,
    "tanh": tanh,
}
