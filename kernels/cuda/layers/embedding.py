"""x = wte[token] + wpe[position]. wte is packed in panels, as a tied head needs it."""

import functools

from tinygpt.kernels.cuda.packing import OUT_TILE, STEP, STEP_SIZE
from tinygpt.kernels.cuda.runtime.jit import kernel
from tinygpt.kernels.cuda.runtime.ptx import (
    bits_to_float32,
    let_next_kernel_begin,
    rounded_product,
    wait_for_kernel_before,
)

from numba import cuda, float32, int32, int64, uint32  # isort: skip

EMBED_THREADS = 256


@functools.cache
def embed_kernel(dtype: str):
    """Return embed(x, token_ids, positions, embeds, wte, scales, wpe, columns, num_steps, sizes). Grid: N.

    x (N, C) float32. wte: panels of (V, C), with a scale for each token. wpe (n_positions, C) float32. Token id -1 - j
    stands for row j of embeds (E, C).
    """
    is_float32, is_int8 = dtype == "float32", dtype == "int8"

    def embed(x, token_ids, positions, embeds, wte, scales, wpe, columns, num_steps, sizes):
        let_next_kernel_begin()
        n = int32(cuda.blockIdx.x)
        if n >= sizes[0]:
            return
        wait_for_kernel_before()
        token, at = token_ids[n], positions[n] * columns
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
                    value = rounded_product(weight, scales[token])  # not fused with the sum
                else:
                    value = bits_to_float32(uint32(wte[start + k // 32 * 256 + g * 32 + k % 32]) << uint32(16))
            x[n * columns + c] = value + wpe[at + c]

    return kernel(embed)
