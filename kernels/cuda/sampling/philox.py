"""Philox4x64-10, a random number generator without state.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from tinygpt.kernels.cuda.runtime.jit import device_function

from numba import uint64  # isort: skip

MULTIPLIER_0, MULTIPLIER_1 = 0xD2E7470EE14C6C93, 0xCA5A826395121157
INCREMENT_0, INCREMENT_1 = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
ROUNDS = 10
LOW_HALF, HALF_BITS = 0xFFFFFFFF, 32
UNUSED_BITS = 11  # a float64 in [0, 1) has 53


@device_function
def random_fraction(seed, sample_index, position):
    """The reference's `uniform` as a uint64, in units of 2**-64."""
    a, b, c, d = uint64(position) + uint64(1), uint64(0), uint64(0), uint64(0)
    key_0, key_1 = uint64(seed), uint64(sample_index)
    for _ in range(ROUNDS):
        a, b, c, d = (
            multiply_high(uint64(MULTIPLIER_1), c) ^ b ^ key_0,
            uint64(MULTIPLIER_1) * c,
            multiply_high(uint64(MULTIPLIER_0), a) ^ d ^ key_1,
            uint64(MULTIPLIER_0) * a,
        )
        key_0, key_1 = key_0 + uint64(INCREMENT_0), key_1 + uint64(INCREMENT_1)
    return a >> uint64(UNUSED_BITS) << uint64(UNUSED_BITS)


@device_function
def multiply_high(x, y):
    """The upper 64 bits of x * y, from products of 32-bit halves."""
    low, bits = uint64(LOW_HALF), uint64(HALF_BITS)
    x_low, x_high, y_low, y_high = x & low, x >> bits, y & low, y >> bits
    middle = x_high * y_low + (x_low * y_low >> bits)
    other = x_low * y_high + (middle & low)
    return x_high * y_high + (middle >> bits) + (other >> bits)
