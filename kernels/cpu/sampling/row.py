"""Passes over one row of scores, shaped so that LLVM vectorises them."""

import numpy as np

from tinygpt.kernels.cpu.jit import jit

BLOCK = 64  # scores that share a maximum in the search for the k-th greatest
PARTIAL_SUMS = 64  # that LLVM adds side by side
STRIDE = 1024  # a search goes by strides before it looks at single elements

# Float32 bits but for the sign, and the keys of -inf and +inf (see `key_of`).
MAGNITUDE = np.int32(0x7FFFFFFF)
LEAST_KEY, GREATEST_KEY = -0x7F800001, 0x7F800000

LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
EXP_MIN = -700.0


@jit
def is_finite(scores):
    """No NaN, no +inf and something above -inf."""
    bad = alive = 0
    for i in range(scores.size):
        bad += not scores[i] < np.inf
        alive += scores[i] > -np.inf
    return bad == 0 and alive > 0


@jit
def greatest_of(scores):
    """By keys: LLVM vectorises a maximum of integers, but not of floats, which may be NaN."""
    greatest = np.int32(LEAST_KEY)
    for i in range(scores.size):
        greatest = max(greatest, key_of(scores[i]))
    return value_of(greatest)


@jit
def kth_greatest(scores, k):
    """Select among the few scores that reach the k-th greatest of the blocks' maxima, a lower bound."""
    blocks = (scores.size + BLOCK - 1) // BLOCK
    if k > blocks:
        return value_of(_bisect_count(scores, k))
    maxima = np.empty(blocks, np.float32)
    for block in range(blocks):
        maxima[block] = greatest_of(scores[block * BLOCK : (block + 1) * BLOCK])
    bound = value_of(_bisect_count(maxima, k))
    reaching = np.empty(scores.size, np.float32)
    count = 0
    for block in range(blocks):
        if maxima[block] >= bound:
            for score in scores[block * BLOCK : (block + 1) * BLOCK]:
                if score >= bound:
                    reaching[count] = score
                    count += 1
    return value_of(_bisect_count(reaching[:count], k))


@jit
def _bisect_count(scores, k):
    """The greatest key whose value is reached by k scores."""
    low, high = LEAST_KEY, GREATEST_KEY
    while low < high:
        middle = (low + high + 1) >> 1
        value = value_of(middle)
        count = 0
        for i in range(scores.size):
            count += scores[i] >= value
        low, high = (middle, high) if count >= k else (low, middle - 1)
    return low


@jit
def first_of(scores, value):
    """The lowest index that holds `value`; in strides, since a loop that may stop is not vectorised."""
    start = 0
    while not count_of(scores[start : start + STRIDE], value):
        start += STRIDE
    while scores[start] != value:
        start += 1
    return start


@jit
def count_of(scores, value):
    """How many scores equal `value`."""
    count = 0
    for i in range(scores.size):
        count += scores[i] == value
    return count


@jit
def key_of(value):
    """An int32 that orders as the float32 does, -0 just below 0."""
    bits = np.float32(value).view(np.int32)
    return np.int32(bits ^ ((bits >> np.int32(31)) & MAGNITUDE))


@jit
def value_of(key):
    """The float32 that `key_of` turns into this key."""
    bits = np.int32(key)
    return np.int32(bits ^ ((bits >> np.int32(31)) & MAGNITUDE)).view(np.float32)


@jit
def sum_of(weights):
    """PARTIAL_SUMS sums, element i in number i % PARTIAL_SUMS, then added up: vectorised, yet in a fixed order."""
    partial = np.zeros(PARTIAL_SUMS)
    full = weights.size - weights.size % PARTIAL_SUMS
    for start in range(0, full, PARTIAL_SUMS):
        for lane in range(PARTIAL_SUMS):
            partial[lane] += weights[start + lane]
    for i in range(full, weights.size):
        partial[i - full] += weights[i]
    total = 0.0
    for lane in range(PARTIAL_SUMS):
        total += partial[lane]
    return total


@jit
def mass_reaching(scores, probabilities, value):
    """The sum of the probabilities whose score is `value` or more, in the order of `sum_of`."""
    partial = np.zeros(PARTIAL_SUMS)
    full = scores.size - scores.size % PARTIAL_SUMS
    for start in range(0, full, PARTIAL_SUMS):
        for lane in range(PARTIAL_SUMS):
            i = start + lane
            partial[lane] += probabilities[i] * (scores[i] >= value)
    for i in range(full, scores.size):
        partial[i - full] += probabilities[i] * (scores[i] >= value)
    total = 0.0
    for lane in range(PARTIAL_SUMS):
        total += partial[lane]
    return total


@jit
def exponentials(scores, weights):
    """weights[i] = e**(scores[i] - the greatest score), in float64."""
    greatest = np.float64(greatest_of(scores))
    for i in range(scores.size):
        weights[i] = exponential(scores[i] - greatest)


@jit
def exponential(x):
    """e**x for x <= 0 within 2 units in the last place, 0 below EXP_MIN; a call to libm is not vectorised.

    2**n * e**r with |r| <= ln(2)/2, e**r by its Taylor series: the next term, r**13/13!, is below 2e-16.
    """
    held = max(x, EXP_MIN)
    n = np.floor(held * LOG2_E + 0.5)
    r = held - n * LN2_HIGH - n * LN2_LOW
    p = 1 / 479001600
    p = p * r + 1 / 39916800
    p = p * r + 1 / 3628800
    p = p * r + 1 / 362880
    p = p * r + 1 / 40320
    p = p * r + 1 / 5040
    p = p * r + 1 / 720
    p = p * r + 1 / 120
    p = p * r + 1 / 24
    p = p * r + 1 / 6
    p = p * r + 1 / 2
    p = p * r + 1
    p = p * r + 1
    scale = np.int64((np.int64(np.int32(n)) + 1023) << 52).view(np.float64)
    return p * scale if x >= EXP_MIN else 0.0
