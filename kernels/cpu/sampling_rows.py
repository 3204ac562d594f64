"""Passes over one row of scores that LLVM vectorizes.

They make no array: without reference counts a pass compiles in a fraction of the time.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir

from ..numbers import BUCKETS, BUCKETS_PER_UNIT, INFINITE_BITS, SIZE_BITS
from .jit import Intrinsic, inline, kernel
from .simd.vector_ir import address, array_at, float32_at
from .team import atomic_load, atomic_store, claim, complete, finish_phase

BLOCK = 64  # scores that share a maximum in the search for the k-th greatest
PARTIAL_SUMS = 64  # accumulators that LLVM adds side by side

MAGNITUDE = np.int32(SIZE_BITS)
# The keys of -inf and +inf: see `key_of`.
LEAST_KEY = ~INFINITE_BITS
GREATEST_KEY = INFINITE_BITS

LOG2_E = 1.4426950408889634
LN2_HIGH = 6.93147180369123816490e-01
LN2_LOW = 1.90821492927058770002e-10
EXP_MIN = -700.0


class Work(NamedTuple):
    """A row's candidates in order of token id, and scratch of searches."""

    ids: np.ndarray  # (V,) int32
    scores: np.ndarray  # (V,) float32
    weights: np.ndarray  # (V,) float64, exponentials of the scores
    probabilities: np.ndarray  # (V,) float32
    chosen: np.ndarray  # (V,) float32
    masses: np.ndarray  # (V,) float32
    sums: np.ndarray  # (BUCKETS,) float64


class Buffers(NamedTuple):
    """The memory of `Work`: a call from Python pays for each array."""

    ids: np.ndarray  # (V,) int32
    singles: np.ndarray  # (4, V) float32
    doubles: np.ndarray  # (V + BUCKETS,) float64


def new_buffers(vocab_size: int) -> Buffers:
    ids = np.empty(vocab_size, np.int32)
    singles = np.empty((4, vocab_size), np.float32)
    return Buffers(ids, singles, np.empty(vocab_size + BUCKETS))


@inline
def work_in(buffers):
    ids, singles, doubles = buffers
    return Work(ids, singles[0], doubles[: ids.size], singles[1], singles[2], singles[3], doubles[ids.size :])


@kernel
def divide(logits, temperature, ids, scores):
    """Make every token a candidate. Return whether the row is finite."""
    bad = alive = 0
    for i in range(logits.size):
        score = logits[i] / temperature
        ids[i], scores[i] = i, score
        bad += not score < np.inf
        alive += score > -np.inf
    return bad == 0 and alive > 0


@kernel
def greatest_of(scores):
    """Return the greatest score by keys: LLVM does not vectorize a maximum of floats, which may be NaN."""
    greatest = np.int32(LEAST_KEY)
    for i in range(scores.size):
        key = key_of(scores[i])
        greatest = key if key > greatest else greatest
    return value_of(np.int64(greatest))


@inline
def kth_greatest(scores, k, work):
    blocks = (scores.size + BLOCK - 1) // BLOCK
    candidates = scores
    if k <= blocks:
        maxima, count = work.masses[:blocks], 0
        for block in range(blocks):
            maxima[block] = greatest_of(scores[block * BLOCK : (block + 1) * BLOCK])
        bound = reached_by(maxima, k)
        for block in range(blocks):
            if maxima[block] >= bound:
                for i in range(block * BLOCK, min((block + 1) * BLOCK, scores.size)):
                    if scores[i] >= bound:
                        work.chosen[count] = scores[i]
                        count += 1
        candidates = work.chosen[:count]
    return reached_by(candidates, k)


@kernel
def reached_by(scores, k):
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
    """Return an int32 that orders as the float32 does, -0 just below 0."""
    bits = np.float32(value).view(np.int32)
    return np.int32(bits ^ ((bits >> np.int32(31)) & MAGNITUDE))


@kernel
def value_of(key):
    bits = np.int32(key)
    return np.int32(bits ^ ((bits >> np.int32(31)) & MAGNITUDE)).view(np.float32)


@Intrinsic
def _partial_sums(typingctx):
    """Return an array of PARTIAL_SUMS float64 on the stack, which LLVM keeps in registers."""
    from numba import types
    from numba.core import cgutils

    array = types.Array(types.float64, 1, "C")

    def codegen(context, builder, signature, args):
        data = cgutils.alloca_once(builder, ir.DoubleType(), PARTIAL_SUMS)
        return array_at(context, builder, array, data, context.get_constant(types.intp, PARTIAL_SUMS))

    return array(), codegen


@kernel
def sum_of(weights):
    """Return the sum of PARTIAL_SUMS partial sums: a fixed order that LLVM vectorizes."""
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
    greatest = np.float64(greatest_of(scores))
    for i in range(scores.size):
        weights[i] = exponential(scores[i] - greatest)


@inline
def exponential(x):
    """Return e**x for x <= 0 within 2 units in the last place: 2**n * e**r by its Taylor series."""
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


@kernel
def find_border(scores, masses, limit, work):
    """Return the score at which masses, summed from the least score, exceed `limit`, and the sum before it."""
    greatest, sums = greatest_of(scores), work.sums
    sums[:] = 0
    for i in range(scores.size):
        sums[_bucket_of(greatest - scores[i])] += masses[i]
    before, crossing = 0.0, -1
    for step in range(BUCKETS):
        bucket = BUCKETS - 1 - step
        if np.float32(before + sums[bucket]) > limit:
            crossing = bucket
            break
        before += sums[bucket]
    if crossing < 0:
        return greatest, before - mass_reaching(scores, masses, greatest)
    count = 0
    for i in range(scores.size):
        if _bucket_of(greatest - scores[i]) == crossing:
            work.chosen[count] = -scores[i]
            work.masses[count] = masses[i]
            count += 1
    inside = work.chosen[:count]
    border = _search(inside, work.masses, before, limit)
    for i in range(count):
        before += work.masses[i] * (inside[i] > border)
    return -border, before


@kernel
def _search(values, masses, before, limit):
    low = GREATEST_KEY
    high = np.int64(key_of(greatest_of(values)))
    for i in range(values.size):
        key = np.int64(key_of(values[i]))
        low = key if key < low else low
    while low < high:
        middle = (low + high + 1) >> 1
        mass = before + mass_reaching(values, masses, value_of(middle))
        low, high = (middle, high) if np.float32(mass) > limit else (low, middle - 1)
    return value_of(low)


@inline
def _bucket_of(gap):
    return np.int64(min(gap * BUCKETS_PER_UNIT, np.float32(BUCKETS - 1)))


MAX_ENDS = 64  # with more, a call is one step
SCAN_BLOCK = 1024  # scores, 4 KB, in the L1 cache
NOT_A_NUMBER = MAGNITUDE  # above every key
ONE = np.int64(1)


class Choices(NamedTuple):
    wanted: np.ndarray  # (1,) int64: steps; 0: only logits
    counts: np.ndarray  # (R,) int64
    token_ids: np.ndarray  # (steps, R) int32; -1: the row is not finite
    ends: np.ndarray  # (MAX_ENDS,) int32: tokens that end a sequence
    num_ends: np.ndarray  # (1,) int64
    has_ended: np.ndarray  # (1,) int64
    stop_early: np.ndarray  # (1,) int64, set by any thread
    num_tokens: np.ndarray  # (R,) int64: a token is of its row's first scores


@kernel
def choose_greatest(team, step, choices, logits):
    """Make each row's greatest logit of (R, V), among its first num_tokens, the next token. A phase."""
    rows = logits.shape[0] if choices.wanted[0] else 0
    items = max(rows, ONE)  # late threads count phases
    row = claim(team, items)
    while row >= 0:
        if row < rows:
            scores = address(logits) + row * logits.shape[1] * 4
            token_id = greatest(float32_at(scores, choices.num_tokens[row]))
            choices.token_ids[choices.counts[row], row] = token_id
            choices.counts[row] += ONE
            if token_id < 0 or _is_end(token_id, choices):
                atomic_store(address(choices.has_ended), ONE)
            step.token_ids[row] = max(token_id, 0)
            step.positions[row] += 1
        complete(team, items)
        row = claim(team, items)
    finish_phase(team)


@kernel
def _is_end(token_id, choices):
    is_end = False
    for i in range(choices.num_ends[0]):
        is_end = is_end or choices.ends[i] == token_id
    return is_end


@kernel
def is_last_step(choices):
    return atomic_load(address(choices.stop_early)) + atomic_load(address(choices.has_ended)) > 0


@kernel
def greatest(scores):
    """Return the first greatest score's index; -1 if a score is NaN or +inf, or all are -inf."""
    best, first = np.int32(LEAST_KEY), np.int64(0)
    for start in range(0, scores.size, SCAN_BLOCK):
        key = _greatest_key(float32_at(address(scores) + start * 4, min(SCAN_BLOCK, scores.size - start)))
        if key > best:
            best, first = key, start
    if best == LEAST_KEY or best >= GREATEST_KEY:
        return np.int32(-1)
    while _key(scores[first]) != best:
        first += 1
    return np.int32(first)


@kernel
def _greatest_key(scores):
    best = np.int32(LEAST_KEY)
    for i in range(scores.size):
        key = _key(scores[i])
        best = key if key > best else best
    return best


@kernel
def _key(score):
    return key_of(score + np.float32(0)) if score == score else NOT_A_NUMBER
