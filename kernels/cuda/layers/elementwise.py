"""The activations between c_fc and c_proj, by the names of kernels/reference/layers.py; none overflows."""

import math

from tinygpt.kernels.cuda.runtime.jit import device_function

from numba import float32  # isort: skip

import functools

from tinygpt.kernels.cuda.packing import OUT_TILE, STEP, STEP_SIZE
from tinygpt.kernels.cuda.runtime.jit import kernel
from tinygpt.kernels.cuda.runtime.ptx import (
    bits_to_float32,
    let_next_kernel_begin,
    rounded_product,
    wait_for_kernel_before,
)

from numba import cuda, int32, int64, uint32  # isort: skip


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


EMBED_THREADS = 256


@functools.cache
def embed_kernel(dtype: str):
    """embed(x, token_ids, positions, embeds, wte, scales, wpe, columns, num_steps, sizes): a block for each token.

    x (N, C) float32. wte: panels of (V, C), and a scale for each token. wpe (n_positions, C) float32. Token id -1 - j
    stands for row j of embeds (E, C) in place of wte's.
    """
    embed_row = embed_row_function(dtype)

    def embed(x, token_ids, positions, embeds, wte, scales, wpe, columns, num_steps, sizes):
        let_next_kernel_begin()
        n = int32(cuda.blockIdx.x)
        if n >= sizes[0]:
            return
        wait_for_kernel_before()
        embed_row(x, n, token_ids[n], positions[n], embeds, wte, scales, wpe, columns, num_steps)

    return kernel(embed)


@functools.cache
def embed_row_function(dtype: str):
    """embed_row(x, n, token, position, embeds, wte, scales, wpe, columns, num_steps), by EMBED_THREADS threads."""
    is_float32, is_int8 = dtype == "float32", dtype == "int8"

    @device_function
    def embed_row(x, n, token, position, embeds, wte, scales, wpe, columns, num_steps):
        at = position * columns
        g, base = token % int32(OUT_TILE), int64(token // int32(OUT_TILE)) * num_steps * int32(STEP_SIZE)
        for c in range(int32(cuda.threadIdx.x), columns, int32(EMBED_THREADS)):
            if token < 0:
                value = embeds[(-1 - token) * columns + c]
            else:
                start, k = base + (c // int32(STEP)) * int32(STEP_SIZE), c % int32(STEP)
                if is_float32:
                    value = wte[start + k // 16 * 128 + g * 16 + k % 16]
                elif is_int8:
                    weight = float32(wte[start + g * 64 + k % 32 // 8 * 16 + k // 32 * 8 + k % 8])
                    value = rounded_product(weight, scales[token])  # the same in each kernel
                else:
                    value = bits_to_float32(uint32(wte[start + k // 32 * 256 + g * 32 + k % 32]) << uint32(16))
            x[n * columns + c] = value + wpe[at + c]

    return embed_row
