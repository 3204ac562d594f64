"""What removes tokens before one is drawn, by a block; the reference's warpers.py says what and why.

A token that goes has its score set to -inf; each filter looks at what the one before has left.
"""

import math

from tinygpt.kernels.cuda.runtime.block import block_greatest, block_sum
from tinygpt.kernels.cuda.runtime.jit import device_function
from tinygpt.kernels.cuda.sampling.keys import key_of, value_of
from tinygpt.kernels.cuda.sampling.search import (
    COUNT,
    NEARNESS,
    PROBABILITY,
    UNITS,
    Measure,
    find_border,
    find_tie,
    least_mass_above,
    mass_in,
    nearness_of,
    probability_of,
    weight_of,
)

from numba import cuda, float32, float64, int32, int64, uint32  # isort: skip

HF, OPENAI, FASTERTRANSFORMER = 0, 1, 2  # top_p_rule
# A row of settings, in the order of the fields of `Warpers`.
NUM_SETTINGS = 8
TEMPERATURE, TOP_K, TOP_P, TOP_P_RULE, MIN_P, TYPICAL_P, EPSILON_CUTOFF, ETA_CUTOFF = range(NUM_SETTINGS)


@device_function
def filter_row(row, greatest, warpers, first):
    """Apply the filters of the settings warpers[first:] to the scores of a row; the greatest score that stays.

    A loop over the filters, since whatever is called becomes one more copy of its code.
    """
    for field in range(TOP_K, NUM_SETTINGS):
        setting = warpers[first + field]
        if not _is_on(field, setting, row.size):
            continue
        measure = _measure(row, greatest, field)
        if field in (TOP_K, TOP_P, TYPICAL_P):
            greatest = _keep_to_border(row, measure, field, setting, int32(warpers[first + TOP_P_RULE]))
        else:
            _cut_off(row, measure, _threshold(measure, field, float32(setting)))
    return greatest


@device_function
def _is_on(field, setting, size):
    if field == TOP_K:
        return 0 < setting < size
    if field in (TOP_P, TYPICAL_P):
        return setting < 1
    return field != TOP_P_RULE and setting > 0


@device_function
def _measure(row, greatest, field):
    """What the filter compares."""
    if field == TOP_K:
        return Measure(int32(COUNT), greatest, greatest, float64(0), float64(0), float32(0))
    total = _total_weight(row, greatest)
    if field in (TYPICAL_P, ETA_CUTOFF):
        log_total = math.log(total)
        entropy = _entropy(row, greatest, log_total)
        return Measure(int32(NEARNESS), float32(0), greatest, 1 / total, log_total, entropy)
    return Measure(int32(PROBABILITY), greatest, greatest, 1 / total, float64(0), float32(0))


@device_function
def _keep_to_border(row, measure, field, setting, rule):
    """Keep the first tokens in the order of `measure` up to what the filter asks for; the greatest score among them."""
    border, goal, above, at = find_border(row, measure, _goal(field, setting, rule))
    if border == float32(-math.inf):
        return measure.greatest_score
    if field == TYPICAL_P:
        return _keep_nearest(row, measure, border)
    if field == TOP_K:
        _keep_from(row, border, int32(0), row.size)
    else:
        _keep_top_p(row, measure, float32(setting), rule, border, goal, above, at)
    return measure.greatest_score


@device_function
def _goal(field, setting, rule):
    """For `find_border`."""
    if field == TOP_K:  # and those tied with the k-th
        return int64(setting)
    is_top_p_hf = field == TOP_P and rule == HF
    bound = float32(1 - setting) if is_top_p_hf else float32(setting)
    mass = least_mass_above(bound, field == TYPICAL_P or rule == FASTERTRANSFORMER)
    return int64(1) - mass if is_top_p_hf else mass  # Hugging Face's: what goes stays below that mass


@device_function
def _keep_top_p(row, measure, top_p, rule, border, goal, above, at):
    """Of the tokens tied at the border, `wanted` reach the goal."""
    mass = mass_in(measure, border)
    wanted, ties = 1 + (goal - above - 1) // mass, at // mass
    first, last = int32(0), row.size
    if rule == OPENAI and wanted == 1 and border < measure.greatest_score:  # not one of them lies within p
        first = row.size
    if rule == FASTERTRANSFORMER or (rule == HF and wanted < ties):
        tie = find_tie(row, border, wanted - 1 if rule == FASTERTRANSFORMER else ties - wanted)
        first, last = (int32(0), tie) if rule == FASTERTRANSFORMER else (tie, row.size)
    _keep_from(row, border, first, last)
    if rule == FASTERTRANSFORMER and cuda.threadIdx.x == 0:
        _keep_part(row, last, mass, top_p, above + (wanted - 1) * mass)
    cuda.syncthreads()


@device_function
def _keep_part(row, last, mass, top_p, mass_before):
    """Of the last token's probability, the part that lies within p; of the first one's, all."""
    before = float32(float64(mass_before) / UNITS)
    if mass_before > 0 and float32(float64(mass_before + mass) / UNITS) > top_p:
        part = float64(float32(top_p - before)) / (float64(mass) / UNITS)
        row.scores[row.start + last] += float32(math.log(part))


@device_function
def _keep_nearest(row, measure, border):
    """Keep what is as near as the border; the greatest score that stays, for it may be another now."""
    key = int64(0)
    for i in range(int32(cuda.threadIdx.x), row.size, cuda.blockDim.x):
        score = row.scores[row.start + i]
        if nearness_of(score, measure) < border:
            row.scores[row.start + i] = float32(-math.inf)
        else:
            key = max(key, int64(key_of(score)))
    return value_of(uint32(block_greatest(key, row.shared.strips)))


@device_function
def _keep_from(row, border, first, last):
    """Keep scores above the border, and those at it from id `first` to id `last`."""
    cuda.syncthreads()
    for i in range(int32(cuda.threadIdx.x), row.size, cuda.blockDim.x):
        score = row.scores[row.start + i]
        if score < border or (score == border and not first <= i <= last):
            row.scores[row.start + i] = float32(-math.inf)
    cuda.syncthreads()


@device_function
def _threshold(measure, field, setting):
    """The least probability that stays, float32."""
    if field == MIN_P:
        return float32(setting * float32(measure.inverse_total))
    if field == EPSILON_CUTOFF:
        return setting
    return min(setting, float32(float32(math.sqrt(setting)) * float32(math.exp(-float64(measure.entropy)))))


@device_function
def _cut_off(row, measure, threshold):
    """Keep what is as probable as the threshold, and the most probable tokens."""
    for i in range(int32(cuda.threadIdx.x), row.size, cuda.blockDim.x):
        score = row.scores[row.start + i]
        if float32(-math.inf) < score < measure.greatest_score and probability_of(measure, score) < threshold:
            row.scores[row.start + i] = float32(-math.inf)
    cuda.syncthreads()


@device_function
def _total_weight(row, greatest):
    total = float64(0)
    for i in range(int32(cuda.threadIdx.x), row.size, cuda.blockDim.x):
        score = row.scores[row.start + i]
        if score > float32(-math.inf):
            total += weight_of(score, greatest)
    return block_sum(total, row.shared.sums)


@device_function
def _entropy(row, greatest, log_total):
    """The expected -log(probability), float32; what has no probability adds nothing."""
    total = float64(0)
    for i in range(int32(cuda.threadIdx.x), row.size, cuda.blockDim.x):
        log_probability = float32(float64(row.scores[row.start + i]) - float64(greatest) - log_total)
        if log_probability > float32(-math.inf):
            total += float64(log_probability) * math.exp(float64(log_probability))
    return float32(-block_sum(total, row.shared.sums))
