"""The kernels of first_contact.py: each tries one feature that the engine's kernels rely on."""

from numba import cuda, float32, int32, uint32

from tinygpt.kernels.cuda.runtime.jit import kernel
from tinygpt.kernels.cuda.runtime.ptx import (
    commit_copies,
    copy_async,
    let_next_kernel_begin,
    load_shared,
    mma_bfloat16,
    prefetch,
    prefetch_run,
    shared_address,
    wait_for_copies,
    wait_for_kernel_before,
)


@kernel
def multiply(out, a, b):
    """Compute out (16, 8) float32 = a (16, 32) @ b (8, 32).T of bfloat16 by one warp, as product.py does."""
    lane, zero = int32(cuda.threadIdx.x), float32(0)
    g, q = lane // int32(4), lane % int32(4)
    address = shared_address(cuda.shared.array(24 * 16, float32, alignment=16))  # rows of 64 bytes
    prefetch(a, 0)
    prefetch_run(b, 0, 512)
    for i in range(2):
        copy_async(address + uint32(16 * (lane + 32 * i)), a, 8 * (lane + 32 * i))
    copy_async(address + uint32(1024 + 16 * lane), b, 8 * lane)
    commit_copies()
    wait_for_copies(0)
    cuda.syncthreads()
    upper, lower = load_shared(address + uint32(64 * g + 16 * q)), load_shared(address + uint32(64 * (g + 8) + 16 * q))
    weights = load_shared(address + uint32(1024 + 64 * g + 16 * q))
    c = mma_bfloat16((upper[0], lower[0], upper[1], lower[1]), (weights[0], weights[1]), (zero, zero, zero, zero))
    c = mma_bfloat16((upper[2], lower[2], upper[3], lower[3]), (weights[2], weights[3]), c)
    out[g * 8 + 2 * q], out[g * 8 + 2 * q + 1] = c[0], c[1]
    out[(g + 8) * 8 + 2 * q], out[(g + 8) * 8 + 2 * q + 1] = c[2], c[3]


@kernel
def reverse(out, values, count):
    """Write the values in reverse order through dynamic shared memory, by one block."""
    memory = cuda.shared.array(0, float32, alignment=16)
    for i in range(int32(cuda.threadIdx.x), count, int32(cuda.blockDim.x)):
        memory[i] = values[i]
    cuda.syncthreads()
    for i in range(int32(cuda.threadIdx.x), count, int32(cuda.blockDim.x)):
        out[i] = memory[count - int32(1) - i]


@kernel
def count_up(counts):
    """Add 1 to the number of each block; blocks may start before the previous kernel ends."""
    let_next_kernel_begin()
    wait_for_kernel_before()
    if cuda.threadIdx.x == 0:
        counts[cuda.blockIdx.x] += int32(1)
