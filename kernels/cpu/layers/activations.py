"""Activations on a run of float32 values, in place: loops that LLVM vectorizes, without libm.

Every step is one IEEE operation or an fma: bits depend neither on the place in a vector nor on the CPU.
"""

import numpy as np

from ...numbers import ROUNDING
from ..jit import kernel
from ..simd.vector_ir import fma

LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)  # their sum is ln 2 to 34 bits
# Lower values give 0, higher values EXP_MAX's: the inverse must not be a denormal.
EXP_MIN = np.float32(-87.0)
EXP_MAX = np.float32(80.0)
ONE = np.float32(1)
HALF = np.float32(0.5)
TWO = np.float32(2)
ZERO = np.float32(0)

TWICE_SQRT_2_OVER_PI = np.float32(1.5957691216057308)  # (1 + tanh(y)) / 2 is sigmoid(2y)
CUBIC = np.float32(0.044715)
SQRT_HALF = np.float32(0.7071067811865476)
QUICK = np.float32(1.702)

# NumPy scalars: Numba compiles anew for each Python constant.
NONE, GELU_TANH, GELU, QUICK_GELU, RELU, SILU, TANH = np.arange(7)
ACTIVATIONS = {
    "gelu_tanh": GELU_TANH,
    "gelu": GELU,
    "quick_gelu": QUICK_GELU,
    "relu": RELU,
    "silu": SILU,
    "tanh": TANH,
}


@kernel
def exp(x):
    """Return e**x within 2 units in the last place; NaN stays NaN.

    2**n * e**r with |r| <= ln(2)/2, e**r by a minimax polynomial with the coefficients of Cephes' expf.
    """
    held = EXP_MIN if x < EXP_MIN else x  # NaN compares false
    held = EXP_MAX if held > EXP_MAX else held
    rounded = fma(held, LOG2_E, ROUNDING)  # n in its last bits
    n = rounded - ROUNDING
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, held))
    p = fma(np.float32(1.9875691500e-4), r, np.float32(1.3981999507e-3))
    p = fma(p, r, np.float32(8.3334519073e-3))
    p = fma(p, r, np.float32(4.1665795894e-2))
    p = fma(p, r, np.float32(1.6666665459e-1))
    p = fma(p, r, HALF)
    p = fma(p * r, r, r) + ONE
    scale = np.int32((np.float32(rounded).view(np.int32) + np.int32(127)) << np.int32(23)).view(np.float32)
    return ZERO if x < EXP_MIN else p * scale


@kernel
def tanh(x):
    """Return 1 - 2 / (e**2x + 1), which loses digits below 0.625: there a polynomial."""
    size = abs(x)
    large = ONE - TWO / (exp(size + size) + ONE)
    s = x * x
    p = fma(np.float32(-5.70498872745e-3), s, np.float32(2.06390887954e-2))
    p = fma(p, s, np.float32(-5.37397155531e-2))
    p = fma(p, s, np.float32(1.33314422036e-1))
    p = fma(p, s, np.float32(-3.33332819422e-1))
    small = fma(p * s, size, size)
    result = small if size < np.float32(0.625) else large
    return -result if x < ZERO else result


@kernel
def sigmoid(x):
    return ONE / (ONE + exp(-x))


@kernel
def erf(x):
    """Return erf within 5e-7: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26."""
    size = abs(x)
    t = ONE / fma(np.float32(0.3275911), size, ONE)
    p = fma(np.float32(1.061405429), t, np.float32(-1.453152027))
    p = fma(p, t, np.float32(1.421413741))
    p = fma(p, t, np.float32(-0.284496736))
    p = fma(p, t, np.float32(0.254829592))
    result = ONE - p * t * exp(-size * size)
    return -result if x < ZERO else result


@kernel
def activate(x, kind):
    n = x.size
    if kind == GELU_TANH:
        for i in range(n):
            inner = fma(CUBIC * x[i] * x[i], x[i], x[i])
            x[i] = x[i] * sigmoid(TWICE_SQRT_2_OVER_PI * inner)
    elif kind == GELU:
        for i in range(n):
            x[i] = HALF * x[i] * (ONE + erf(x[i] * SQRT_HALF))
    elif kind == QUICK_GELU:
        for i in range(n):
            x[i] = x[i] * sigmoid(QUICK * x[i])
    elif kind == RELU:
        for i in range(n):
            x[i] = max(x[i], ZERO) if x[i] == x[i] else x[i]
    elif kind == SILU:
        for i in range(n):
            x[i] = x[i] * sigmoid(x[i])
    elif kind == TANH:
        for i in range(n):
            x[i] = tanh(x[i])
