"""Reductions over the 32 lanes of a warp, and over a block of up to 1024 threads.

Kernels reserve shared memory: two callers cannot link one device function that does.
"""

from tinygpt.kernels.cuda.runtime.jit import device_function  # first: it prepares numba.cuda for NumPy 2.5

from numba import cuda, int32, int64, uint32  # isort: skip

WARP = 32
LANE_BITS = 5
ALL_LANES = 0xFFFFFFFF
MAX_WARPS = 32


@device_function
def warp_sum(value):
    """Return the sum of all lanes' values, added in one order."""
    value += cuda.shfl_xor_sync(uint32(ALL_LANES), value, 16)
    value += cuda.shfl_xor_sync(uint32(ALL_LANES), value, 8)
    value += cuda.shfl_xor_sync(uint32(ALL_LANES), value, 4)
    value += cuda.shfl_xor_sync(uint32(ALL_LANES), value, 2)
    value += cuda.shfl_xor_sync(uint32(ALL_LANES), value, 1)
    return value


@device_function
def warp_greatest(value):
    """Return the greatest of all lanes' int64."""
    for i in range(LANE_BITS):
        value = max(value, cuda.shfl_xor_sync(uint32(ALL_LANES), value, int32(1 << i)))
    return value


@device_function
def warp_cumulated(value):
    """Return the sum of the int64 of this lane and the lanes before it."""
    lane = int32(cuda.threadIdx.x) % WARP
    for i in range(LANE_BITS):
        before = cuda.shfl_up_sync(uint32(ALL_LANES), value, int32(1 << i))
        value += before if lane >= 1 << i else int64(0)
    return value


@device_function
def block_sum(value, partial):
    """Return the sum of all threads' values, added in one order. partial: shared, (MAX_WARPS,)."""
    value = warp_sum(value)
    if int32(cuda.threadIdx.x) % WARP == 0:
        partial[int32(cuda.threadIdx.x) // WARP] = value
    cuda.syncthreads()
    total = partial[0]
    for warp in range(1, int32(cuda.blockDim.x) // WARP):
        total += partial[warp]
    cuda.syncthreads()
    return total


@device_function
def block_greatest(value, partial):
    """Return the greatest of all threads' int64. partial: shared, (MAX_WARPS,) int64."""
    value = warp_greatest(value)
    if int32(cuda.threadIdx.x) % WARP == 0:
        partial[int32(cuda.threadIdx.x) // WARP] = value
    cuda.syncthreads()
    greatest = partial[0]
    for warp in range(1, int32(cuda.blockDim.x) // WARP):
        greatest = max(greatest, partial[warp])
    cuda.syncthreads()
    return greatest
