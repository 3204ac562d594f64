"""Where in a row a sum of masses reaches a goal, by a block without a sort.

Masses are whole numbers, whose sums do not depend on an order: threads may add them up in shared memory as they come.
A probability is as many units of 2**-62, which is exact for all above 2**-39; the weight of a token that may be drawn
is its probability in proportion to the greatest one, in units such that no sum passes 2**63.
"""

import math
from typing import Any, NamedTuple

from tinygpt.kernels.cuda.runtime.block import warp_cumulated
from tinygpt.kernels.cuda.runtime.jit import device_function
from tinygpt.kernels.cuda.runtime.ptx import bits_to_float32, float32_to_bits
from tinygpt.kernels.cuda.runtime.warp import ALL_LANES, WARP, warp_sum
from tinygpt.kernels.cuda.sampling.keys import key_of, value_of
from tinygpt.kernels.cuda.sampling.philox import multiply_high

from numba import cuda, float32, float64, int32, int64, uint32, uint64  # isort: skip

COUNT, PROBABILITY, NEARNESS = 0, 1, 2
UNITS = 2.0**62
# The search for a border first sums up by buckets, and then looks into one, by the digits of its keys.
BUCKETS = 1024
# exp(-104) is 0 in float32, the precision of the filters: lower scores have no probability.
BUCKETS_PER_UNIT = BUCKETS / 104
DIGIT_BITS, DIGITS, KEY_BITS = 8, 256, 32


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
    """What a search orders tokens by, and what it adds up.

    COUNT: scores, and ones. PROBABILITY: scores, and probabilities. NEARNESS: minus the distance of a token's
    -log(probability) from the entropy, and probabilities.
    """

    kind: int
    greatest_value: float
    greatest_score: float
    inverse_total: float  # 1 / the sum of weights
    log_total: float
    entropy: float


@device_function
def weight_of(score, greatest_score):
    """float64, in proportion to the probability, 1 for the greatest score."""
    return math.exp(float64(score) - float64(greatest_score))


@device_function
def probability_of(measure, score):
    """float32, which is the precision that the filters compare in."""
    return float32(weight_of(score, measure.greatest_score) * measure.inverse_total)


@device_function
def nearness_of(score, measure):
    """Of the information to what is expected, float32."""
    log_probability = float32(float64(score) - float64(measure.greatest_score) - measure.log_total)
    return -abs(-log_probability - measure.entropy)


@device_function
def value_in(measure, score):
    return nearness_of(score, measure) if measure.kind == NEARNESS else score


@device_function
def mass_in(measure, score):
    if measure.kind == COUNT:
        return int64(1)
    return int64(float64(probability_of(measure, score)) * UNITS)


@device_function
def least_mass_above(bound, or_equal):
    """The least mass, 1 or more, that is above `bound` (0 to 1) when it is rounded to float32."""
    bits = float32_to_bits(bound)
    if or_equal:  # above the float32 before
        if bits == uint32(0):
            return int64(1)
        bits = uint32(bits - uint32(1))
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
            its_key = int64(key_of(value_in(measure, score)))
            if its_key >> (shift + DIGIT_BITS) == key:
                digit = int32((its_key >> shift) & (DIGITS - 1))
                _add_mass(row.shared, DIGITS - 1 - digit, mass_in(measure, score))
        digit, goal, above, at = _find_bucket(row.shared, DIGITS, above, goal)
        key = key << DIGIT_BITS | int64(DIGITS - 1 - digit)
    return value_of(uint32(key)), goal, above, at


@device_function
def _bucket_of(measure, score):
    gap = measure.greatest_value - value_in(measure, score)
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
