"""The simulator of CUDA kernels: what it computes, and that it refuses what a GPU would get wrong in silence."""

from contextlib import nullcontext

import numpy as np
import pytest
from numba import cuda, float32, int32, uint32

from support.cuda_device import SimulatedDevice
from support.cuda_simulator import simulate
from tinygpt.kernels.cuda.runtime.jit import device_function, kernel
from tinygpt.kernels.cuda.runtime.ptx import (
    commit_copies,
    copy_async,
    load_shared,
    load_weights,
    mma_bfloat16,
    pack_bfloat16,
    prefetch,
    shared_address,
    wait_for_copies,
    wait_for_kernel_before,
)

FULL = 0xFFFFFFFF


@device_function
def warp_sum(value):
    for shift in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(uint32(FULL), value, shift)
    return value


@kernel
def sum_rows(out, rows, columns):
    shared = cuda.shared.array(8, float32)
    thread, row = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
    total = float32(0)
    for c in range(thread, columns, cuda.blockDim.x):
        total += rows[row * columns + c]
    total = warp_sum(total)
    if thread % 32 == 0:
        shared[thread // 32] = total
    cuda.syncthreads()
    if thread == 0:
        total = float32(0)
        for warp in range(cuda.blockDim.x // 32):
            total += shared[warp]
        out[row] = total


@pytest.mark.parametrize("threads", [32, 96])
def test_barriers_shuffles_and_shared_memory(threads):
    rows = np.random.default_rng(0).standard_normal((3, 77)).astype(np.float32)
    out = np.full(3, np.nan, np.float32)
    simulate(sum_rows, 3, threads, out, rows.ravel(), 77)
    np.testing.assert_allclose(out, rows.sum(1), rtol=1e-5)


@kernel
def product(out, a, b):
    """out (16, 8) = a (16, 16) @ b (16, 8); some of a is made up."""
    lane = int32(cuda.threadIdx.x)
    g, q = lane // 4, lane % 4
    words = load_weights(a, lane * 8), load_weights(b, lane * 8)
    c = (float32(0), float32(0), float32(0), float32(0))
    x = pack_bfloat16(float32(lane), float32(1))
    c = mma_bfloat16((words[0][0], x, x, words[0][1]), (words[1][0], words[1][1]), c)
    out[g * 8 + 2 * q], out[g * 8 + 2 * q + 1] = c[0], c[1]
    out[(g + 8) * 8 + 2 * q], out[(g + 8) * 8 + 2 * q + 1] = c[2], c[3]


def test_product_of_a_warp():
    generator = np.random.default_rng(1)
    words_a = generator.integers(0x3F80, 0x4000, (32, 8), np.uint16)
    words_b = generator.integers(0x3F80, 0x4000, (32, 8), np.uint16)
    out = np.full(128, np.nan, np.float32)
    simulate(product, 1, 32, out, words_a.ravel(), words_b.ravel())
    a, b = np.zeros((16, 16)), np.zeros((16, 8))

    def value(bits):
        return (bits.astype(np.uint32) << 16).view(np.float32)

    for lane in range(32):
        g, q = lane // 4, lane % 4
        a[g, 2 * q : 2 * q + 2], a[g + 8, 2 * q + 8 : 2 * q + 10] = value(words_a[lane, :2]), value(words_a[lane, 2:4])
        a[g + 8, 2 * q : 2 * q + 2] = a[g, 2 * q + 8 : 2 * q + 10] = lane, 1
        b[2 * q : 2 * q + 2, g], b[2 * q + 8 : 2 * q + 10, g] = value(words_b[lane, :2]), value(words_b[lane, 2:4])
    np.testing.assert_allclose(out.reshape(16, 8), a @ b, rtol=1e-6)


@kernel
def reversed_copy(out, values):
    shared = cuda.shared.array(128, uint32, alignment=16)
    thread, address = int32(cuda.threadIdx.x), shared_address(shared)
    copy_async(address + uint32(16 * thread), values, 4 * thread)
    commit_copies()
    wait_for_copies(0)
    cuda.syncthreads()
    words = load_shared(address + uint32(16 * (31 - thread)))
    for i in range(4):
        out[4 * thread + i] = words[i]


def test_asynchronous_copies():
    values, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    simulate(reversed_copy, 1, 32, out, values)
    assert (out.reshape(32, 4) == values.reshape(32, 4)[::-1]).all()


@kernel
def unwaited_copy(out, values):
    shared = cuda.shared.array(128, float32, alignment=16)
    thread, address = int32(cuda.threadIdx.x), shared_address(shared)
    copy_async(address + uint32(16 * thread), values, 4 * thread)
    commit_copies()
    cuda.syncthreads()
    out[thread] = shared[thread]


def test_a_copy_that_is_not_waited_for_has_not_happened():
    out = np.zeros(32, np.float32)
    simulate(unwaited_copy, 1, 32, out, np.ones(128, np.float32))
    assert np.isnan(out).all()


@kernel
def divergent(out):
    if cuda.threadIdx.x < 16:
        cuda.syncthreads()
        out[0] = float32(1)
    else:
        cuda.syncwarp()


def test_a_barrier_that_some_threads_pass_by_is_refused():
    with pytest.raises(RuntimeError, match="not all threads reach"):
        simulate(divergent, 1, 32, np.zeros(1, np.float32))


@kernel
def out_of_bounds(out, index):
    out[index] = float32(1)


@pytest.mark.parametrize("index", [-1, 4])
def test_an_index_out_of_bounds_is_refused(index):
    with pytest.raises(IndexError, match=f"index {index} of 4"):
        simulate(out_of_bounds, 1, 1, np.zeros(4, np.float32), index)


@kernel
def write_first(out, values):
    wait_for_kernel_before()
    out[0] = values[0]


@kernel
def read_early(out, values):
    before = values[0]
    wait_for_kernel_before()
    out[0] = before


@kernel
def write_early(out, values):
    out[0] = values[0]
    wait_for_kernel_before()


@kernel
def never_wait(out, values):
    prefetch(values, 0)  # brings it nearer and takes nothing from it


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (write_first, None),
        (read_early, "read_early reads, before it waits, what a kernel before it writes"),
        (write_early, "something is written before the kernel has waited"),
        (never_wait, "never_wait ends before the kernels before it do"),
    ],
)
def test_a_kernel_of_a_graph_waits_for_the_one_before(kernel, message):
    device, a, b = SimulatedDevice(), np.ones(1, np.float32), np.zeros(1, np.float32)

    def queue() -> None:
        device.launch(write_first, 1, 1, a, b)
        device.launch(kernel, 1, 1, b, a)

    with pytest.raises(AssertionError, match=message) if message else nullcontext():
        device.capture(queue)()
