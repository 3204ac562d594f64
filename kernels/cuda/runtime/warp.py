"""What the 32 lanes of a warp compute together."""

from tinygpt.kernels.cuda.runtime.jit import device_function  # first: it readies numba.cuda for NumPy 2.5

from numba import cuda, uint32  # isort: skip

WARP = 32
ALL_LANES = 0xFFFFFFFF


@device_function
def warp_sum(value):
    """The sum of all lanes' values, in each lane, added up in one order."""
    value += cuda.shfl_xor_sync(uint32(ALL_LANES), value, 16)
    value += cuda.shfl_xor_sync(uint32(ALL_LANES), value, 8)
    value += cuda.shfl_xor_sync(uint32(ALL_LANES), value, 4)
    value += cuda.shfl_xor_sync(uint32(ALL_LANES), value, 2)
    value += cuda.shfl_xor_sync(uint32(ALL_LANES), value, 1)
    return value
