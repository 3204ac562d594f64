"""A draw from a row of scores by one block, after temperature, top-k, top-p and min-p, without a sort.

A filter sets the scores that it removes to -inf. Masses are integers, whose sum does not depend on the order:
probabilities in units of 2**-62, and weights, exponentials of scores, in units that keep every sum below 2**63.
Of 1e9 usual draws from 50257 tokens a few differ from the reference's, by what its sums and these round.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, float64, int32, int64, uint32, uint64

from ..numbers import BUCKETS, BUCKETS_PER_UNIT
from .draw_arithmetic import (
    EXPONENT_BIAS,
    MANTISSA_BITS,
    ONE,
    POWERS,
    POWERS_SIZE,
    ZERO,
    in_units,
    multiply_high,
    power_of_2,
    random_fraction,
    weight_of,
    write_power,
)
from .jit import (
    ALL_LANES,
    MAX_WARPS,
    WARP,
    bits_to_float32,
    block_sum,
    device_function,
    float32_to_bits,
    kernel,
    lane_and_warp,
    let_next_kernel_begin,
    of_thread,
    rounded_product,
    wait_for_kernel_before,
    warp_cumulated,
    warp_sum,
)

DRAW_THREADS = 512
BLOCKS_AT_ONCE = 1  # of a multiprocessor: for two, each with half of its registers, the compiler spills some
NUM_SETTINGS = 4
TEMPERATURE, TOP_K, TOP_P, MIN_P = range(NUM_SETTINGS)

UNIT_BITS = 62
UNITS = 2.0**UNIT_BITS
WEIGHT_BITS, SUM_BITS = 53, 63  # at most, of a weight of 1 and of a vocabulary's sum
MINUS_INFINITY = np.float32(-math.inf)
DIGIT_BITS = 8
DIGITS = 256
KEY_BITS = 32
SIGN = 0x80000000
ALL_ONES = 0xFFFFFFFF
ID_BITS = 31
ALL_IDS = (1 << ID_BITS) - 1


class Shared(NamedTuple):
    powers: Any  # (POWERS_SIZE,) float32: 2**(i / POWERS), then what is left of each
    strips: Any  # (MAX_WARPS,) int64
    low: Any  # (BUCKETS,) uint32, the lower half of each bucket's sum
    high: Any  # (BUCKETS,) uint32
    answer: Any  # (4,) int64
    counter: Any  # (1,) int32


class Row(NamedTuple):
    """Scores, -inf for a removed token, and room for ids, `size` from `start` on. 2**weight_bits: a weight of 1."""

    scores: Any
    ids: Any
    start: int
    size: int
    weight_bits: int
    shared: Shared


@functools.partial(kernel, threads=(DRAW_THREADS, BLOCKS_AT_ONCE))
def draw_tokens(
    logits,
    vocab_size,
    count,
    rows,
    num_tokens,
    settings,
    seeds,
    sample_indices,
    positions,
    scores,
    ids,
    token_ids,
):
    """Draw a token for each row with a temperature above 0, after `take_greatest`. Grid: B. Arrays: SamplingBuffers.

    token_ids: (count,), the greatest logit's before; -1 after if no score is finite, divided by the temperature
    """
    let_next_kernel_begin()
    wait_for_kernel_before()
    shared = Shared(
        cuda.shared.array(POWERS_SIZE, float32),
        cuda.shared.array(MAX_WARPS, int64),
        cuda.shared.array(BUCKETS, uint32),
        cuda.shared.array(BUCKETS, uint32),
        cuda.shared.array(4, int64),
        cuda.shared.array(1, int32),
    )
    thread = int32(cuda.threadIdx.x)
    if thread < POWERS:
        write_power(shared.powers, thread)
    r = int32(cuda.blockIdx.x)
    while r < count:
        greatest_id = token_ids[r]
        if rows[r] >= 0 and settings[NUM_SETTINGS * r + TEMPERATURE] != 0 and greatest_id >= 0:
            cuda.syncthreads()  # every thread has read the token, which changes below, and left the row before
            first = int64(rows[r]) * int64(vocab_size)
            size = min(int32(vocab_size), num_tokens[r])
            start = int64(cuda.blockIdx.x) * int64(vocab_size)
            row = Row(scores, ids, start, size, _weight_bits(size), shared)
            fraction = random_fraction(seeds[r], sample_indices[r], positions[r])
            token_id = _draw(row, logits, first, greatest_id, settings, NUM_SETTINGS * r, fraction)
            if thread == 0:
                token_ids[r] = token_id
        r += int32(cuda.gridDim.x)


@device_function
def _weight_bits(size):
    size_bits = int32(float32_to_bits(float32(size)) >> uint32(MANTISSA_BITS)) - (EXPONENT_BIAS - 1)
    return min(WEIGHT_BITS, SUM_BITS - size_bits)


@device_function
def _draw(row, logits, first, greatest_id, settings, first_setting, fraction):
    temperature = float32(settings[first_setting + TEMPERATURE])
    greatest = logits[first + greatest_id] / temperature
    if not MINUS_INFINITY < greatest < -MINUS_INFINITY:
        return int32(-1)
    for i in of_thread(0, row.size):
        row.scores[row.start + i] = logits[first + i] / temperature
    cuda.syncthreads()
    _filter_row(row, greatest, settings, first_setting)
    return _first_passing(row, greatest, True, int64(0), fraction)


@device_function
def _filter_row(row, greatest, settings, first):
    """Apply the filters of settings[first:], in a loop, as each call is inlined."""
    for field in range(TOP_K, NUM_SETTINGS):
        setting = settings[first + field]
        if not _is_on(field, setting, row.size):
            continue
        inverse_total = (ZERO, ZERO) if field == TOP_K else _inverse_total(row, greatest)
        if field == MIN_P:
            greatest_probability = probability_of(row, greatest, greatest, inverse_total)
            _cut_off(row, greatest, inverse_total, float32(setting) * greatest_probability)
            continue
        goal = int64(setting) if field == TOP_K else int64(1) - least_mass_above(float32(1 - setting))
        border, goal, above, at = find_border(row, greatest, inverse_total, goal)
        if border == MINUS_INFINITY:
            continue
        first_tie = int32(0)  # tokens tied with the k-th all stay
        if field == TOP_P:  # of tokens tied at p, the highest ids stay
            mass = mass_of(row, border, greatest, inverse_total)
            wanted = 1 + (goal - above - 1) // mass
            ties = at // mass
            if wanted < ties:
                first_tie = _first_passing(row, border, False, ties - wanted, uint64(0))
        _keep_from(row, border, first_tie)


@device_function
def _is_on(field, setting, size):
    if field == TOP_K:
        return 0 < setting < size
    return setting < 1 if field == TOP_P else setting > 0


@device_function
def _inverse_total(row, greatest):
    """Return 1 / the sum of all weights as a sum of two float32."""
    total = int64(0)
    for i in of_thread(0, row.size):
        total += units_of(row, row.scores[row.start + i], greatest)
    total = block_sum(total, row.shared.strips)
    high = float32(total)
    low = float32(total - int64(high))
    inverse = ONE / high
    rest = rounded_product(inverse, cuda.fma(low, -inverse, cuda.fma(high, -inverse, ONE)))
    scale = power_of_2(row.weight_bits)
    return inverse * scale, rest * scale


@device_function
def _keep_from(row, border, first_tie):
    cuda.syncthreads()
    for i in of_thread(0, row.size):
        score = row.scores[row.start + i]
        if score < border or (score == border and i < first_tie):
            row.scores[row.start + i] = MINUS_INFINITY
    cuda.syncthreads()


@device_function
def _cut_off(row, greatest, inverse_total, threshold):
    for i in of_thread(0, row.size):
        score = row.scores[row.start + i]
        if (
            MINUS_INFINITY < score < greatest
            and probability_of(row, score, greatest, inverse_total) < threshold
        ):
            row.scores[row.start + i] = MINUS_INFINITY
    cuda.syncthreads()


@device_function
def key_of(value):
    """Return a uint32 that orders as the float32 `value` does, -0 like 0."""
    bits = uint32(0) if value == float32(0) else float32_to_bits(value)
    return uint32(bits ^ uint32(ALL_ONES)) if bits >= uint32(SIGN) else uint32(bits ^ uint32(SIGN))


@device_function
def value_of(key):
    return bits_to_float32(
        uint32(key ^ uint32(SIGN)) if key >= uint32(SIGN) else uint32(key ^ uint32(ALL_ONES))
    )


@device_function
def rank_of(key, index):
    """Return an int64 that orders by a uint32 key, then from high indices to low."""
    return int64(key) << int64(ID_BITS) | int64(ALL_IDS - index)


@device_function
def index_of(rank):
    return int64(ALL_IDS) - (rank & int64(ALL_IDS))


@device_function
def units_of(row, score, greatest):
    """Return a weight in units of 2**-row.weight_bits."""
    high, low, exponent = weight_of(score, greatest, row.shared.powers)
    scale = power_of_2(exponent)
    return in_units(high * scale, low * scale, row.weight_bits)


@device_function
def probability_of(row, score, greatest, inverse_total):
    high, low, exponent = weight_of(score, greatest, row.shared.powers)
    inverse, inverse_rest = inverse_total
    product = rounded_product(high, inverse)
    rest = cuda.fma(low, inverse, cuda.fma(high, inverse_rest, cuda.fma(high, inverse, -product)))
    return (product + rest) * power_of_2(exponent)


@device_function
def mass_of(row, score, greatest, inverse_total):
    """Return the probability in UNITS, or 1 if inverse_total is 0."""
    if inverse_total[0] == ZERO:
        return int64(1)
    return in_units(probability_of(row, score, greatest, inverse_total), ZERO, UNIT_BITS)


@device_function
def least_mass_above(bound):
    """Return the least mass, at least 1, that exceeds `bound` after rounding to float32."""
    bits = float32_to_bits(bound)
    below = float64(bits_to_float32(bits))
    above = float64(bits_to_float32(uint32(bits + uint32(1))))
    middle = (below + above) * (UNITS / 2)  # rounds to the even of the two
    mass = int64(middle)
    is_rounded_up = bits % uint32(2) == uint32(1) and float64(mass) == middle
    return mass if is_rounded_up else mass + int64(1)


@device_function
def find_border(row, greatest, inverse_total, goal):
    """Return the first score, from the greatest down, at which the sum of masses reaches `goal`; -inf if none does.

    Return with it the goal, and the sums above the score and at it. To a goal of 0 or less the sum of all is added.
    """
    _clear(row.shared, BUCKETS)
    for i in of_thread(0, row.size):
        score = row.scores[row.start + i]
        if score > MINUS_INFINITY:
            _add_mass(row.shared, _bucket_of(greatest, score), mass_of(row, score, greatest, inverse_total))
    bucket, goal, above, at = _find_bucket(row.shared, BUCKETS, int64(0), goal)
    if bucket == BUCKETS:
        return MINUS_INFINITY, goal, above, at
    count = _gather(row, greatest, bucket)
    key = int64(0)
    for shift in range(KEY_BITS - DIGIT_BITS, -1, -DIGIT_BITS):
        _clear(row.shared, DIGITS)
        for i in of_thread(0, count):
            score = row.scores[row.start + row.ids[row.start + i]]
            its_key = int64(key_of(score))
            if its_key >> (shift + DIGIT_BITS) == key:
                digit = int32((its_key >> shift) & (DIGITS - 1))
                _add_mass(row.shared, DIGITS - 1 - digit, mass_of(row, score, greatest, inverse_total))
        digit, goal, above, at = _find_bucket(row.shared, DIGITS, above, goal)
        key = key << DIGIT_BITS | int64(DIGITS - 1 - digit)
    return value_of(uint32(key)), goal, above, at


@device_function
def _bucket_of(greatest, score):
    return int32(min((greatest - score) * BUCKETS_PER_UNIT, float32(BUCKETS - 1)))


@device_function
def _gather(row, greatest, bucket):
    """Write a bucket's ids to row.ids. Return their number."""
    counter = row.shared.counter
    if cuda.threadIdx.x == 0:
        counter[0] = 0
    cuda.syncthreads()
    for i in of_thread(0, row.size):
        score = row.scores[row.start + i]
        if score > MINUS_INFINITY and _bucket_of(greatest, score) == bucket:
            row.ids[row.start + cuda.atomic.add(counter, 0, int32(1))] = i
    cuda.syncthreads()
    return counter[0]


@device_function
def _clear(shared, size):
    for i in of_thread(0, size):
        shared.low[i], shared.high[i] = uint32(0), uint32(0)
    cuda.syncthreads()


@device_function
def _add_mass(shared, bucket, mass):
    """Add a mass to a bucket as two 32-bit sums: shared memory adds these faster."""
    added = uint32(mass)
    carry = uint32(mass >> int64(32))
    if uint32(cuda.atomic.add(shared.low, bucket, added) + added) < added:
        carry = uint32(carry + uint32(1))
    if carry > uint32(0):
        cuda.atomic.add(shared.high, bucket, carry)


@device_function
def _find_bucket(shared, size, above, goal):
    """Return the first bucket at which the sum, with `above`, reaches the goal, or `size`; then as `find_border`."""
    answer = shared.answer
    cuda.syncthreads()
    lane = int32(cuda.threadIdx.x)
    share = size // WARP
    if lane < WARP:
        mass = int64(0)
        for i in range(share):  # rotated, so that lanes read from different banks
            mass += _mass_at(shared, lane * share + (i + lane) % share)
        end = above + warp_cumulated(mass)
        total = cuda.shfl_sync(uint32(ALL_LANES), end, WARP - 1)
        if goal <= 0:
            goal = max(goal + total, int64(1))
        if lane == WARP - 1 and total < goal:
            answer[0], answer[1], answer[2], answer[3] = int64(size), goal, total, int64(0)
        if end - mass < goal <= end:
            end -= mass
            i = lane * share
            while end + _mass_at(shared, i) < goal:
                end += _mass_at(shared, i)
                i += 1
            answer[0], answer[1], answer[2], answer[3] = int64(i), goal, end, _mass_at(shared, i)
    cuda.syncthreads()
    return int32(answer[0]), answer[1], answer[2], answer[3]


@device_function
def _mass_at(shared, i):
    return int64(shared.high[i]) << int64(32) | int64(shared.low[i])


@device_function
def _first_passing(row, score, is_draw, goal, fraction):
    """Return the first token at which the sum exceeds the goal, by strips, down to a warp's tokens.

    The sum is of weights, and the goal fraction * 2**-64 of their total, or the sum is of scores that equal `score`.
    """
    strips = row.shared.strips
    answer = row.shared.answer
    begin, end, is_first = int32(0), int32(row.size), True
    while is_first or end - begin > WARP:
        total = _sum_strips(row, score, is_draw, begin, end)
        if is_first and is_draw:
            goal = int64(multiply_high(fraction, uint64(total)))
        is_first = False
        length = _strip_length(end - begin)
        strip = int32(0)
        while goal >= strips[strip]:
            goal -= strips[strip]
            strip += 1
        begin = int32(begin + strip * length)
        end = min(end, int32(begin + length))
    i = int32(begin + int32(cuda.threadIdx.x))
    if cuda.threadIdx.x < WARP:
        mass = _draw_mass(row, i, score, is_draw) if i < end else int64(0)
        sum_with = warp_cumulated(mass)
        if sum_with - mass <= goal < sum_with:
            answer[0] = int64(i)
    cuda.syncthreads()
    return int32(answer[0])


@device_function
def _sum_strips(row, score, is_draw, begin, end):
    strips = row.shared.strips
    lane, warp = lane_and_warp()
    length = _strip_length(end - begin)
    mass = int64(0)
    start = int32(begin + warp * length)
    for i in range(int32(start + lane), min(end, int32(start + length)), WARP):
        mass += _draw_mass(row, i, score, is_draw)
    mass = warp_sum(mass)
    cuda.syncthreads()  # every thread has read the previous strips
    if lane == 0:
        strips[warp] = mass
    cuda.syncthreads()
    total = int64(0)
    for i in range(int32(cuda.blockDim.x) // WARP):
        total += strips[i]
    return total


@device_function
def _strip_length(count):
    return int32((count + int32(cuda.blockDim.x) - 1) // int32(cuda.blockDim.x) * WARP)


@device_function
def _draw_mass(row, i, score, is_draw):
    its_score = row.scores[row.start + i]
    return units_of(row, its_score, score) if is_draw else int64(its_score == score)
