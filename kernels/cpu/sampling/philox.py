"""Philox4x64-10, a random number generator without state.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import numpy as np

from tinygpt.kernels.cpu.jit import inline, kernel

MULTIPLIER_0, MULTIPLIER_1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
INCREMENT_0, INCREMENT_1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
ROUNDS = 10
LOW_HALF, HALF_BITS = np.uint64(0xFFFFFFFF), np.uint64(32)


@kernel
def uniform(seed, sample_index, position):
    """The first number in [0, 1) of Philox4x64-10; see the reference's `uniform`."""
    a, b, c, d = position + np.uint64(1), np.uint64(0), np.uint64(0), np.uint64(0)
    key_0, key_1 = seed, sample_index
    for _ in range(ROUNDS):
        a, b, c, d = (
            _multiply_high(MULTIPLIER_1, c) ^ b ^ key_0,
            MULTIPLIER_1 * c,
            _multiply_high(MULTIPLIER_0, a) ^ d ^ key_1,
            MULTIPLIER_0 * a,
        )
        key_0, key_1 = key_0 + INCREMENT_0, key_1 + INCREMENT_1
    return np.float64(a >> np.uint64(11)) * 2.0**-53


@inline
def _multiply_high(x, y):
    """The upper 64 bits of x * y, from products of 32-bit halves."""
    x_low, x_high, y_low, y_high = x & LOW_HALF, x >> HALF_BITS, y & LOW_HALF, y >> HALF_BITS
    middle = x_high * y_low + (x_low * y_low >> HALF_BITS)
    other = x_low * y_high + (middle & LOW_HALF)
    return x_high * y_high + (middle >> HALF_BITS) + (other >> HALF_BITS)
