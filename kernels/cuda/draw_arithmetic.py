"""The arithmetic of draws: random numbers, and exponentials as sums of two float32.

Many GPUs have a float64 unit for 64 of float32. The exponentials, of 1 and less, are off by less than 2**-43.
"""

import math

import numpy as np
from numba import cuda, float32, float64, int32, int64, uint32, uint64

from .. import numbers
from .jit import bits_to_float32, device_function, rounded_product

UPPER_BITS = 31
UPPER_UNITS = np.float32(2.0**UPPER_BITS)
LEAST_EXPONENT = np.float32(-87)  # exp of less needs an exponent that float32 lacks
POWER_BITS = 5
POWERS = 1 << POWER_BITS  # a bank of shared memory for each
POWERS_SIZE = 2 * POWERS
STEP_LOG = math.log(2) / POWERS
STEP = np.float32(STEP_LOG)
STEP_REST = np.float32(STEP_LOG - float(STEP))
STEPS = np.float32(1 / STEP_LOG)
ZERO, HALF, ONE, SIXTH, SHARE_4, SHARE_5 = map(np.float32, (0, 1 / 2, 1, 1 / 6, 1 / 24, 1 / 120))
MANTISSA_BITS, EXPONENT_BIAS = 23, 127


multiply_high = device_function(numbers.multiply_high)
_random_bits = device_function(numbers.philox(multiply_high))


@device_function
def random_fraction(seed, sample_index, position):
    """Return the reference's `uniform` as a uint64, in units of 2**-64."""
    return _random_bits(uint64(seed), uint64(sample_index), uint64(position)) << numbers.UNUSED_BITS


@device_function
def power_of_2(exponent):
    return bits_to_float32(uint32(exponent + EXPONENT_BIAS << MANTISSA_BITS))


@device_function
def in_units(high, low, bits):
    """Return high + low, from 0 to 1, in units of 2**-bits. Many GPUs are slow to make an int64 of a float."""
    scaled = high * UPPER_UNITS
    upper = uint32(scaled)
    rest = cuda.fma(low, UPPER_UNITS, scaled - float32(upper))
    bits -= UPPER_BITS
    lower = cuda.libdevice.float2int_rn(rest * power_of_2(bits))
    return (int64(upper) << int64(bits)) + int64(lower)


@device_function
def write_power(powers, i):
    power = math.exp(STEP_LOG * i)
    powers[i] = float32(power)
    powers[POWERS + i] = float32(power - float64(powers[i]))


@device_function
def weight_of(score, greatest, powers):
    """Return exp(score - greatest) as (high + low) * 2**exponent, and the exponent."""
    high = score - greatest
    if high < LEAST_EXPONENT:
        return ZERO, ZERO, int32(0)
    back = high - score
    low = (score - (high - back)) - (greatest + back)
    # high + low = number * log(2) / POWERS + x + rest
    number = cuda.libdevice.float2int_rn(high * STEPS)
    step = float32(number)
    product = rounded_product(step, STEP)
    x = high - product
    rest = cuda.fma(step, -STEP_REST, low - cuda.fma(step, STEP, -product))
    # upper + lower = exp(x + rest) - 1
    square = rounded_product(x, x)
    upper = cuda.fma(square, HALF, x)
    cubic = cuda.fma(x, cuda.fma(x, SHARE_5, SHARE_4), SIXTH)
    lower = cuda.fma(rounded_product(x, square), cubic, cuda.fma(upper, rest, rest))
    lower = cuda.fma(cuda.fma(x, x, -square), HALF, lower)
    lower += cuda.fma(square, HALF, x - upper)
    i = number & (POWERS - 1)
    power = powers[i]
    product = rounded_product(power, upper)
    rest = cuda.fma(power, lower, cuda.fma(power, upper, -product))
    rest = cuda.fma(powers[POWERS + i], upper, rest + powers[POWERS + i])
    high = power + product
    return high, rest + (product - (high - power)), number >> POWER_BITS
