"""Passes over one row of scores, shaped so that LLVM vectorises them.

None of them makes an array: they take `work`, parts of three buffers that are made once for all rows. Without arrays
of their own they need no reference counts, and compile in a fraction of the time.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tinygpt.kernels.cpu.jit import inline, kernel

BLOCK = 64  # scores that share a maximum in the search for the k-th greatest
PARTIAL_SUMS = 64  # that LLVM adds side by side
STRIDE = 1024  # a search goes by strides before it looks at single elements
BUCKETS = 1024  # the search for a border first sums up by buckets, and then looks into one

# Float32 bits but for the sign, and the keys of -inf and +inf (see `key_of`).
MAGNITUDE = np.int32(0x7FFFFFFF)
LEAST_KEY, GREATEST_KEY = -0x7F800001, 0x7F800000

LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
EXP_MIN = -700.0


class Room(NamedTuple):
    """Where a search puts what it is narrowed down to."""

    chosen: np.ndarray  # (V,) float32
    masses: np.ndarray  # (V,) float32
    sums: np.ndarray  # (BUCKETS,) float64


class Work(NamedTuple):
    """A row's candidates in order of token id, and room for what is computed from them."""

    ids: np.ndarray  # (V,) int32
    scores: np.ndarray  # (V,) float32
    weights: np.ndarray  # (V,) float64, exponentials of the scores
    probabilities: np.ndarray  # (V,) float32
    nearness: np.ndarray  # (V,) float32
    terms: np.ndarray  # (V,) float64
    room: Room


class Buffers(NamedTuple):
    """What `Work` lies in: a call from Python pays for each array that it makes or hands over."""

    ids: np.ndarray  # (V,) int32
    singles: np.ndarray  # (5, V) float32
    doubles: np.ndarray  # (2 * V + BUCKETS,) float64


def new_buffers(vocab_size: int) -> Buffers:
    ids, singles = np.empty(vocab_size, np.int32), np.empty((5, vocab_size), np.float32)
    return Buffers(ids, singles, np.empty(2 * vocab_size + BUCKETS))


@inline
def work_in(buffers):
    ids, singles, doubles = buffers
    room = Room(singles[3], singles[4], doubles[2 * ids.size :])
    return Work(ids, singles[0], doubles[: ids.size], singles[1], singles[2], doubles[ids.size : 2 * ids.size], room)


@kernel
def divide(logits, temperature, ids, scores):
    """Make every token a candidate; whether no score is NaN or +inf, and one is above -inf."""
    bad = alive = 0
    for i in range(logits.size):
        score = logits[i] / temperature
        ids[i], scores[i] = i, score
        bad += not score < np.inf
        alive += score > -np.inf
    return bad == 0 and alive > 0


@kernel
def greatest_of(scores):
    """By keys: LLVM vectorises a maximum of integers, but not of floats, which may be NaN."""
    greatest = np.int32(LEAST_KEY)
    for i in range(scores.size):
        key = key_of(scores[i])
        greatest = key if key > greatest else greatest
    return value_of(np.int64(greatest))


@inline
def kth_greatest(scores, k, room):
    """Select among the few scores that reach the k-th greatest of the blocks' maxima, a lower bound."""
    blocks = (scores.size + BLOCK - 1) // BLOCK
    candidates = scores
    if k <= blocks:
        maxima, count = room.masses[:blocks], 0
        for block in range(blocks):
            maxima[block] = greatest_of(scores[block * BLOCK : (block + 1) * BLOCK])
        bound = _reached_by(maxima, k)
        for block in range(blocks):
            if maxima[block] >= bound:
                for i in range(block * BLOCK, min((block + 1) * BLOCK, scores.size)):
                    if scores[i] >= bound:
                        room.chosen[count] = scores[i]
                        count += 1
        candidates = room.chosen[:count]
    return _reached_by(candidates, k)


@kernel
def _reached_by(scores, k):
    """The greatest value that is reached by k scores."""
    low, high = LEAST_KEY, GREATEST_KEY
    while low < high:
        middle = (low + high + 1) >> 1
        value = value_of(middle)
        count = 0
        for i in range(scores.size):
            count += scores[i] >= value
        low, high = (middle, high) if count >= k else (low, middle - 1)
    return value_of(low)


@kernel
def key_of(value):
    """An int32 that orders as the float32 does, -0 just below 0."""
    bits = np.float32(value).view(np.int32)
    return np.int32(bits ^ ((bits >> np.int32(31)) & MAGNITUDE))


@kernel
def value_of(key):
    """The float32 that `key_of` turns into this key."""
    bits = np.int32(key)
    return np.int32(bits ^ ((bits >> np.int32(31)) & MAGNITUDE)).view(np.float32)


@intrinsic
def _partial_sums(typingctx):
    """An array of PARTIAL_SUMS float64 on the stack, for the calling function alone: LLVM holds it in registers."""
    array = types.Array(types.float64, 1, "C")

    def codegen(context, builder, signature, args):
        from numba.np.arrayobj import populate_array  # see vector_ir.py

        result, size = context.make_array(array)(context, builder), context.get_constant(types.intp, PARTIAL_SUMS)
        data, itemsize = (
            cgutils.alloca_once(builder, ir.DoubleType(), PARTIAL_SUMS),
            context.get_constant(types.intp, 8),
        )
        populate_array(
            result, data=data, shape=[size], strides=[itemsize], itemsize=itemsize, meminfo=None, parent=None
        )
        return result._getvalue()

    return array(), codegen


@kernel
def sum_of(weights):
    """PARTIAL_SUMS sums, element i in number i % PARTIAL_SUMS, then added up: vectorised, yet in a fixed order."""
    partial = _partial_sums()
    partial[:] = 0
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


@kernel
def mass_reaching(scores, probabilities, value):
    """The sum of the probabilities whose score is `value` or more, in the order of `sum_of`."""
    partial = _partial_sums()
    partial[:] = 0
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


@kernel
def exponentials(scores, weights):
    """weights[i] = e**(scores[i] - the greatest score), in float64."""
    greatest = np.float64(greatest_of(scores))
    for i in range(scores.size):
        weights[i] = exponential(scores[i] - greatest)


@inline
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
