"""The reference's uniform numbers on a GPU, from a request's seed, its sample's index and a position."""

from numba import uint64

from .jit import device_function

# Philox4x64-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
MULTIPLIER_0 = 0xD2E7470EE14C6C93
MULTIPLIER_1 = 0xCA5A826395121157
INCREMENT_0 = 0x9E3779B97F4A7C15
INCREMENT_1 = 0xBB67AE8584CAA73B
ROUNDS = 10
UNUSED_BITS = 11  # a float64 in [0, 1) has 53
LOW_HALF = 0xFFFFFFFF
HALF_BITS = 32


@device_function
def random_fraction(seed, sample_index, position):
    """Return the reference's `uniform` as a uint64, in units of 2**-64."""
    a = uint64(position) + uint64(1)
    b = uint64(0)
    c = uint64(0)
    d = uint64(0)
    key_0, key_1 = uint64(seed), uint64(sample_index)
    for _ in range(ROUNDS):
        a, b, c, d = (
            multiply_high(uint64(MULTIPLIER_1), c) ^ b ^ key_0,
            uint64(MULTIPLIER_1) * c,
            multiply_high(uint64(MULTIPLIER_0), a) ^ d ^ key_1,
            uint64(MULTIPLIER_0) * a,
        )
        key_0 = key_0 + uint64(INCREMENT_0)
        key_1 = key_1 + uint64(INCREMENT_1)
    return a >> uint64(UNUSED_BITS) << uint64(UNUSED_BITS)


@device_function
def multiply_high(x, y):
    """Return the upper 64 bits of x * y."""
    low, bits = uint64(LOW_HALF), uint64(HALF_BITS)
    x_low = x & low
    x_high = x >> bits
    y_low = y & low
    y_high = y >> bits
    middle = x_high * y_low + (x_low * y_low >> bits)
    other = x_low * y_high + (middle & low)
    return x_high * y_high + (middle >> bits) + (other >> bits)
