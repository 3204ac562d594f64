"""The toolchain that the compile checks of the other files rely on: what it reports is what the kernel needs."""

import numpy as np
import pytest
from numba import cuda, float32, int32

from support.cuda_compile import compile_kernel, llvm_of
from tinygpt.kernels.cuda.runtime.jit import kernel
from tinygpt.kernels.cuda.runtime.ptx import load_weights, mma_bfloat16


@kernel
def copy_words(out, words):
    index = int32(cuda.grid(1)) * 4
    loaded = load_weights(words, index)
    for i in range(4):
        out[index + i] = loaded[i]


@kernel
def partly_wanted(out, words, few):
    lane = int32(cuda.threadIdx.x)
    a, b, zero = words[lane], words[lane + 32], float32(0)
    c = mma_bfloat16((a, b, a, b), (a, b), (zero, zero, zero, zero))
    if lane < few:
        out[lane] = c[0]


@pytest.mark.toolchain
def test_a_small_kernel_needs_little():
    compiled = compile_kernel(copy_words, np.zeros(4, np.uint32), np.zeros(4, np.uint32))
    assert "ld.global.L1::no_allocate.v4" in compiled.ptx
    assert compiled.registers <= 32
    assert compiled.spilled == compiled.stack == 0


@pytest.mark.toolchain
def test_a_warp_multiplies_together_even_where_few_lanes_want_the_product():
    """Without `convergent`, the compiler may move an mma to where its result is wanted: past the branch."""
    arguments = np.zeros(4, np.float32), np.zeros(4, np.uint32), 3
    (product,) = (line for line in llvm_of(partly_wanted, *arguments).splitlines() if "mma.sync" in line)
    assert "convergent" in product
    ptx = compile_kernel(partly_wanted, *arguments).ptx
    assert ptx.count("mma.sync") == 1
    assert ptx.index("mma.sync") < ptx.index("bra ")
