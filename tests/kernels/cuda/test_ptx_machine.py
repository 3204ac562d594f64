"""The machine that runs PTX: what it computes, and that it refuses what a GPU would get wrong in silence."""

import functools
import math
from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest
from numba import cuda, float32, int32, uint32

from support import ptx_code
from support.cuda_device import SimulatedDevice
from support.ptx_code import PtxError
from support.ptx_machine import simulate
from support.tables import rows
from tinygpt.kernels.cuda.jit import (
    ALL_LANES,
    arrive,
    commit_copies,
    copy_async,
    kernel,
    load_shared,
    shared_address,
    wait_for_copies,
    wait_for_kernel_before,
)

pytestmark = pytest.mark.toolchain


@functools.cache
def reversed_copy(waits: bool, has_barrier: bool):
    def reverse(out, values):
        shared = cuda.shared.array(128, uint32, alignment=16)
        thread = int32(cuda.threadIdx.x)
        address = shared_address(shared)
        copy_async(address + uint32(16 * thread), values, 4 * thread)
        commit_copies()
        if waits:
            wait_for_copies(0)
        if has_barrier:
            cuda.syncthreads()
        words = load_shared(address + uint32(16 * (31 - thread)))
        for i in range(4):
            out[4 * thread + i] = words[i]

    return kernel(reverse)


@pytest.mark.parametrize(
    ("waits", "has_barrier", "message"),
    rows("""
true | true | null
true | false | "is read that another thread writes, with no barrier between: ld.shared.* line "
false | true | threads end before they have waited for their asynchronous copies
"""),
)
def test_asynchronous_copies(waits, has_barrier, message):
    values = np.arange(128, dtype=np.uint32)
    out = np.zeros(128, np.uint32)
    with pytest.raises(PtxError, match=message) if message else nullcontext():
        simulate(reversed_copy(waits, has_barrier), 1, 32, out, values)
    expected = values if waits else np.full(128, 0xFFFFFFFF)
    assert not has_barrier or (out.reshape(32, 4) == expected.reshape(32, 4)[::-1]).all()


@kernel
def divergent(out):
    if cuda.threadIdx.x < 16:
        cuda.syncthreads()
        out[0] = float32(1)
    else:
        cuda.syncwarp()


@kernel
def unsteady(out):
    """A warp writes what another one reads, and with a barrier in between writes it again."""
    shared = cuda.shared.array(64, float32)
    thread = int32(cuda.threadIdx.x)
    shared[thread] = float32(thread)
    cuda.syncthreads()
    value = shared[63 - thread]
    shared[thread] = value
    out[thread] = value


@kernel
def write_at(out, index):
    out[index] = float32(cuda.threadIdx.x)


@pytest.mark.parametrize(
    ("kernel", "threads", "arguments", "message"),
    [
        (divergent, 32, (), r"not all threads reach .* \{'bar.sync 0': 16, 'bar.warp.sync -1': 16\}"),
        (unsteady, 64, (), "is written that another thread reads, with no barrier between"),
        (write_at, 1, (64,), "4 bytes at a global address outside each array"),
        (write_at, 2, (3,), "two threads write a number"),
    ],
)
def test_what_is_refused(kernel, threads, arguments, message):
    with pytest.raises(PtxError, match=message):
        simulate(kernel, 1, threads, np.zeros(64, np.float32), *arguments)


@functools.cache
def meeting(publishes: bool, acquires: bool):
    """The last of some warps, of a block each, adds up what all lanes have written."""

    def meet(total, values, arrivals):
        block = int32(cuda.blockIdx.x)
        lane = int32(cuda.threadIdx.x)
        arrived = int32(0)
        values[block * 32 + lane] = float32(lane)
        if publishes:
            cuda.syncwarp()
        if lane == 0:
            arrived = int32(arrive(arrivals, 0))
        arrived = cuda.shfl_sync(uint32(ALL_LANES), arrived, 0)
        if acquires:
            cuda.syncwarp()
        if arrived == cuda.gridDim.x - 1:
            own = float32(0)
            for i in range(cuda.gridDim.x):
                own += values[i * 32 + lane]
            total[lane] = own

    return kernel(meet)


@pytest.mark.parametrize(("publishes", "acquires"), [(True, True), (False, True), (True, False)])
def test_an_arrival_publishes_what_a_barrier_is_before_to_what_a_barrier_is_after(publishes, acquires):
    total = np.zeros(32, np.float32)
    simulate(meeting(publishes, acquires), 3, 32, total, np.zeros(96, np.float32), np.zeros(1, np.uint32))
    expected = 3 * np.arange(32, dtype=np.float32)
    expected[1:] = expected[1:] if publishes and acquires else np.nan  # lane 0 arrives itself
    np.testing.assert_array_equal(total, expected)


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
    pass


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
    device = SimulatedDevice()
    a = np.ones(1, np.float32)
    b = np.zeros(1, np.float32)

    def queue() -> None:
        device.launch(write_first, 1, 1, a, b)
        device.launch(kernel, 1, 1, b, a)

    queue()
    with pytest.raises((AssertionError, PtxError), match=message) if message else nullcontext():
        device.capture(queue)()


def exact_sums(*given: np.ndarray) -> list[Fraction]:
    return [
        Fraction(x) * Fraction(y) + Fraction(z)
        for x, y, z in zip(*map(np.ndarray.tolist, given), strict=True)
    ]


def test_sums_of_products_are_rounded_once():
    a, b, c = (np.random.default_rng(i).standard_normal(2000) for i in range(3))
    c[::2] = -(a * b)[::2]  # what is left is the product's rounding
    exact = exact_sums(a, b, c)
    assert ptx_code.fma_rn_f64(a, b, c).tolist() == [float(value) for value in exact]
    a, b, c = (x.astype(np.float32) for x in (a, b, c))
    exact = exact_sums(a, b, c)
    down = ptx_code.fma_rm_f32(a, b, c)
    nearest = ptx_code.fma_rn_f32(a, b, c)
    above = np.nextafter(down, np.float32(np.inf))
    for value, low, near, high in zip(exact, down.tolist(), nearest.tolist(), above.tolist(), strict=True):
        assert low <= value < high
        assert abs(Fraction(near) - value) == min(value - Fraction(low), Fraction(high) - value)


def test_integers_are_divided_and_shifted_as_on_a_gpu():
    a = np.int32([7, -7, 7, -7])
    b = np.int32([2, 2, -2, -2])
    assert ptx_code.quotient(a, b).tolist() == [math.trunc(x / y) for x, y in zip(a, b, strict=True)]
    assert ptx_code.remainder(a, b).tolist() == [math.fmod(x, y) for x, y in zip(a, b, strict=True)]
    counts = np.uint32([0, 3, 32, 99])
    assert ptx_code.shifted(np.uint32([9] * 4), counts, np.right_shift).tolist() == [9, 1, 0, 0]
    assert ptx_code.shifted(np.int32([-9] * 4), counts, np.right_shift).tolist() == [-9, -2, -1, -1]
    values = np.float32([2.9, -2.9, 3e9, -3e9, np.nan])
    assert ptx_code.truncated(values, np.int32).tolist() == [2, -2, 2**31 - 1, -(2**31), 0]
