"""Searches in one row of scores by a block, without a sort: keys that order as scores, sums of masses, random numbers.

Masses are integers, whose sums do not depend on an order: threads add them up in shared memory in any order. A
probability is an integer number of units of 2**-62, exact above 2**-39; the weight of a token that may be drawn is its
probability relative to the greatest one, in units such that no sum exceeds 2**63.
"""

import math
from typing import Any, NamedTuple

from tinygpt.kernels.cuda.runtime.block import ALL_LANES, WARP, warp_cumulated, warp_sum
from tinygpt.kernels.cuda.runtime.jit import device_function
from tinygpt.kernels.cuda.runtime.ptx import bits_to_float32, float32_to_bits

from numba import cuda, float32, float64, int32, int64, uint32, uint64  # isort: skip

SIGN, ALL_ONES = 0x80000000, 0xFFFFFFFF
KEY_OF_MINUS_INFINITY, KEY_OF_REFUSED = 0x007FFFFF, ALL_ONES
ID_BITS = 31
ALL_IDS = (1 << ID_BITS) - 1

COUNT, PROBABILITY = 0, 1
UNITS = 2.0**62
# The search for a border first sums up by buckets, and then looks into one, by the digits of its keys.
BUCKETS = 1024
# exp(-104) is 0 in float32, the precision of the filters: lower scores have no probability.
BUCKETS_PER_UNIT = BUCKETS / 104
DIGIT_BITS, DIGITS, KEY_BITS = 8, 256, 32

# Philox4x64-10, a random number generator without state: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
# easy as 1, 2, 3", SC 2011.
MULTIPLIER_0, MULTIPLIER_1 = 0xD2E7470EE14C6C93, 0xCA5A826395121157
INCREMENT_0, INCREMENT_1 = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
ROUNDS = 10
LOW_HALF, HALF_BITS = 0xFFFFFFFF, 32
UNUSED_BITS = 11  # a float64 in [0, 1) has 53


@device_function
def key_of(value):
    """A uint32 that orders as the float32 `value` does, both zeros alike."""
    bits = uint32(0) if value == float32(0) else float32_to_bits(value)
    return uint32(bits ^ uint32(ALL_ONES)) if bits >= uint32(SIGN) else uint32(bits ^ uint32(SIGN))


@device_function
def value_of(key):
    """The float32 that `key_of` turns into this key."""
    return bits_to_float32(uint32(key ^ uint32(SIGN)) if key >= uint32(SIGN) else uint32(key ^ uint32(ALL_ONES)))


@device_function
def greatest_key(value, token_id):
    """An int64, 0 or more, that is greater for greater values and for lower ids; greatest for NaN and +inf."""
    key = key_of(value) if value < float32(math.inf) else uint32(KEY_OF_REFUSED)
    return int64(key) << int64(ID_BITS) | int64(ALL_IDS - token_id)


@device_function
def token_of(key):
    """The id in a `greatest_key`; -1 if its value is NaN or an infinity."""
    value_key = key >> int64(ID_BITS)
    if value_key <= int64(KEY_OF_MINUS_INFINITY) or value_key == int64(KEY_OF_REFUSED):
        return int64(-1)
    return int64(ALL_IDS) - (key & int64(ALL_IDS))


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


class Shared(NamedTuple):
    """Shared memory of a block, of any content."""

    sums: Any  # (MAX_WARPS,) float64
    strips: Any  # (MAX_WARPS,) int64
    low: Any  # (BUCKETS,) uint32, the lower halves of a sum for each bucket
    high: Any  # (BUCKETS,) uint32
    found: Any  # (4,) int64
    counter: Any  # (1,) int32


class Row(NamedTuple):
    """One row of V scores, -inf where a token is removed, and room for V ids; both from `start` on."""

    scores: Any
    ids: Any
    start: int
    size: int
    shared: Shared


class Measure(NamedTuple):
    """The masses that a search adds up, from the greatest score down: ones (COUNT), or probabilities."""

    kind: int
    greatest_score: float
    inverse_total: float  # 1 / the sum of weights


@device_function
def weight_of(score, greatest_score):
    """float64, in proportion to the probability, 1 for the greatest score."""
    return math.exp(float64(score) - float64(greatest_score))


@device_function
def probability_of(measure, score):
    """float32, which is the precision that the filters compare in."""
    return float32(weight_of(score, measure.greatest_score) * measure.inverse_total)


@device_function
def mass_in(measure, score):
    if measure.kind == COUNT:
        return int64(1)
    return int64(float64(probability_of(measure, score)) * UNITS)


@device_function
def least_mass_above(bound):
    """Return the least mass, 1 or more, that exceeds `bound` (0 to 1) when it is rounded to float32."""
    bits = float32_to_bits(bound)
    below, above = float64(bits_to_float32(bits)), float64(bits_to_float32(uint32(bits + uint32(1))))
    middle = (below + above) * (UNITS / 2)  # is rounded to the even one of both
    mass = int64(middle)
    is_rounded_up = bits % uint32(2) == uint32(1) and float64(mass) == middle
    return mass if is_rounded_up else mass + int64(1)


@device_function
def find_border(row, measure, goal):
    """From the greatest value down: the first with which the sum of the masses reaches `goal`.

    goal: if it is 0 or less, the sum of all masses is added to it, and 1 is the least it can be.

    Returns that value, -inf if the sum never gets there; the goal; the sums of the masses above that value, and at it.
    """
    _clear(row.shared, BUCKETS)
    thread, threads = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
    for i in range(thread, row.size, threads):
        score = row.scores[row.start + i]
        if score > float32(-math.inf):
            _add_mass(row.shared, _bucket_of(measure, score), mass_in(measure, score))
    bucket, goal, above, at = _find_bucket(row.shared, BUCKETS, int64(0), goal)
    if bucket == BUCKETS:
        return float32(-math.inf), goal, above, at
    count, key = _gather(row, measure, bucket), int64(0)
    for shift in range(KEY_BITS - DIGIT_BITS, -1, -DIGIT_BITS):
        _clear(row.shared, DIGITS)
        for i in range(thread, count, threads):
            score = row.scores[row.start + row.ids[row.start + i]]
            its_key = int64(key_of(score))
            if its_key >> (shift + DIGIT_BITS) == key:
                digit = int32((its_key >> shift) & (DIGITS - 1))
                _add_mass(row.shared, DIGITS - 1 - digit, mass_in(measure, score))
        digit, goal, above, at = _find_bucket(row.shared, DIGITS, above, goal)
        key = key << DIGIT_BITS | int64(DIGITS - 1 - digit)
    return value_of(uint32(key)), goal, above, at


@device_function
def _bucket_of(measure, score):
    gap = measure.greatest_score - score
    return int32(min(gap * float32(BUCKETS_PER_UNIT), float32(BUCKETS - 1)))


@device_function
def _gather(row, measure, bucket):
    """The ids of a bucket, in no order, into row.ids; how many."""
    counter = row.shared.counter
    if cuda.threadIdx.x == 0:
        counter[0] = 0
    cuda.syncthreads()
    for i in range(int32(cuda.threadIdx.x), row.size, cuda.blockDim.x):
        score = row.scores[row.start + i]
        if score > float32(-math.inf) and _bucket_of(measure, score) == bucket:
            row.ids[row.start + cuda.atomic.add(counter, 0, int32(1))] = i
    cuda.syncthreads()
    return counter[0]


@device_function
def _clear(shared, size):
    for i in range(int32(cuda.threadIdx.x), size, cuda.blockDim.x):
        shared.low[i], shared.high[i] = uint32(0), uint32(0)
    cuda.syncthreads()


@device_function
def _add_mass(shared, bucket, mass):
    """Two sums of 32 bits, which shared memory adds up faster than one of 64."""
    added, carry = uint32(mass), uint32(mass >> int64(32))
    if uint32(cuda.atomic.add(shared.low, bucket, added) + added) < added:
        carry = uint32(carry + uint32(1))
    if carry > uint32(0):
        cuda.atomic.add(shared.high, bucket, carry)


@device_function
def _find_bucket(shared, size, above, goal):
    """The first bucket with which the sum, `above` included, reaches the goal; `size` if none does.

    Returns it, the goal as `find_border` has it, and the sums above the bucket and in it.
    """
    found = shared.found
    cuda.syncthreads()
    lane, share = int32(cuda.threadIdx.x), size // WARP
    if lane < WARP:
        mass = int64(0)
        for i in range(share):  # in turns, so that the lanes read from different banks
            mass += _mass_at(shared, lane * share + (i + lane) % share)
        end = above + warp_cumulated(mass)
        total = cuda.shfl_sync(uint32(ALL_LANES), end, WARP - 1)
        if goal <= 0:
            goal = max(goal + total, int64(1))
        if lane == WARP - 1 and total < goal:
            found[0], found[1], found[2], found[3] = int64(size), goal, total, int64(0)
        if end - mass < goal <= end:
            end -= mass
            i = lane * share
            while end + _mass_at(shared, i) < goal:
                end += _mass_at(shared, i)
                i += 1
            found[0], found[1], found[2], found[3] = int64(i), goal, end, _mass_at(shared, i)
    cuda.syncthreads()
    return int32(found[0]), found[1], found[2], found[3]


@device_function
def _mass_at(shared, i):
    return int64(shared.high[i]) << int64(32) | int64(shared.low[i])


@device_function
def find_tie(row, value, number):
    """The id of a token whose score is `value`: `number` of these have lower ids."""
    return _first_passing(row, value, 0.0, int64(number), uint64(0))


@device_function
def find_drawn(row, greatest_score, fraction):
    """The first token, by id, with which the sum of the weights exceeds their total times fraction * 2**-64."""
    return _first_passing(row, greatest_score, UNITS / row.size, int64(0), fraction)


@device_function
def _first_passing(row, score, scale, goal, fraction):
    """Into the strip where the sum comes to exceed the goal, and into a strip of that, down to a warp's 32 tokens."""
    strips, found = row.shared.strips, row.shared.found
    begin, end, is_first = int32(0), int32(row.size), True
    while is_first or end - begin > WARP:
        total = _sum_strips(row, score, scale, begin, end)
        if is_first and scale > 0.0:
            goal = int64(multiply_high(fraction, uint64(total)))
        is_first, length, strip = False, _strip_length(end - begin), int32(0)
        while goal >= strips[strip]:
            goal -= strips[strip]
            strip += 1
        begin = int32(begin + strip * length)
        end = min(end, int32(begin + length))
    i = int32(begin + int32(cuda.threadIdx.x))
    if cuda.threadIdx.x < WARP:
        mass = _mass_of(row, i, score, scale) if i < end else int64(0)
        sum_with = warp_cumulated(mass)
        if sum_with - mass <= goal < sum_with:
            found[0] = int64(i)
    cuda.syncthreads()
    return int32(found[0])


@device_function
def _sum_strips(row, score, scale, begin, end):
    """The mass of each of as many strips as there are warps, and of all."""
    thread, strips = int32(cuda.threadIdx.x), row.shared.strips
    lane, warp, length, mass = thread % WARP, thread // WARP, _strip_length(end - begin), int64(0)
    start = int32(begin + warp * length)
    for i in range(int32(start + lane), min(end, int32(start + length)), WARP):
        mass += _mass_of(row, i, score, scale)
    mass = warp_sum(mass)
    cuda.syncthreads()  # all have read what was there
    if lane == 0:
        strips[warp] = mass
    cuda.syncthreads()
    total = int64(0)
    for i in range(int32(cuda.blockDim.x) // WARP):
        total += strips[i]
    return total


@device_function
def _strip_length(count):
    """Whole warps of 32 tokens."""
    return int32((count + int32(cuda.blockDim.x) - 1) // int32(cuda.blockDim.x) * WARP)


@device_function
def _mass_of(row, i, score, scale):
    """The weight of token i, where `score` is the greatest one; scale 0: whether token i has this score."""
    its_score = row.scores[row.start + i]
    if scale == 0.0:
        return int64(its_score == score)
    if its_score == float32(-math.inf):
        return int64(0)
    return int64(cuda.fma(weight_of(its_score, score), scale, 0.5))
