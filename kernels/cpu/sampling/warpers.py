"""What removes tokens before one is drawn, without a sort; the reference's warpers.py says what and why.

A row's candidates are three arrays in order of token id: ids, scores (float32) and weights (float64 exponentials). A
filter moves those that stay to the front and returns how many they are.
Shapes: R rows, one for each token to choose, V vocabulary, K candidates of a row.
"""

import math
from typing import NamedTuple

import numpy as np
from numba.extending import overload

from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.layers.formats import is_a
from tinygpt.kernels.cpu.sampling.row import (
    count_of,
    exponential,
    exponentials,
    greatest_of,
    key_of,
    kth_greatest,
    mass_reaching,
    sum_of,
    value_of,
)

HF, OPENAI, FASTERTRANSFORMER = 0, 1, 2  # top_p_rule
# The search for a border first sums up by buckets, and then looks into one.
BUCKETS = 1024
# exp(-104) is 0 in float32, the precision of the filters: lower scores have no probability.
BUCKETS_PER_UNIT = np.float32(BUCKETS / 104)


class UsualWarpers(NamedTuple):
    """The controls that most requests are content with: kernels for these take half the time to compile."""

    temperature: np.ndarray  # (R,)
    top_k: np.ndarray  # (R,)
    top_p: np.ndarray  # (R,) by Hugging Face's rule


def filter_logits(logits, warpers):
    """As the reference's: (R, V) float32 scores after temperature and all filters, -inf where removed."""
    filtered = np.empty(logits.shape, np.float32)
    _filter_rows(np.ascontiguousarray(logits, np.float32), usual_if_possible(warpers), filtered)
    return filtered


def usual_if_possible(warpers):
    """UsualWarpers, if no row of `warpers` asks for more."""
    is_more = (
        (warpers.top_p_rule != HF)
        | (warpers.min_p > 0)
        | (warpers.typical_p < 1)
        | (warpers.epsilon_cutoff > 0)
        | (warpers.eta_cutoff > 0)
    )
    return warpers if is_more.any() else UsualWarpers(warpers.temperature, warpers.top_k, warpers.top_p)


@jit
def _filter_rows(logits, warpers, filtered):
    ids, scores, weights = new_candidates(logits.shape[1])
    for r in range(logits.shape[0]):
        if warpers.temperature[r] == 0:
            filtered[r] = logits[r]
            continue
        divide(logits[r], np.float32(warpers.temperature[r]), ids, scores)
        kept = filter_candidates(ids, scores, weights, warpers, r)
        filtered[r] = -np.inf
        for i in range(kept):
            filtered[r, ids[i]] = scores[i]


@jit
def new_candidates(vocab_size):
    return np.empty(vocab_size, np.int32), np.empty(vocab_size, np.float32), np.empty(vocab_size, np.float64)


@jit
def divide(logits, temperature, ids, scores):
    """Make every token a candidate."""
    for i in range(logits.size):
        ids[i] = i
        scores[i] = logits[i] / temperature


@jit
def filter_candidates(ids, scores, weights, warpers, r):
    """Apply row r's filters to all V candidates; the number that stay, with their weights."""
    kept = scores.size
    if 0 < warpers.top_k[r] < kept:
        kept = keep_top_k(ids, scores, np.int64(warpers.top_k[r]))
    exponentials(scores[:kept], weights)
    if warpers.top_p[r] < 1:
        kept = keep_top_p(ids[:kept], scores, weights, warpers, r)
    return keep_by_others(ids, scores, weights, kept, warpers, r)


def keep_by_others(ids, scores, weights, kept, warpers, r):
    """Apply the filters that are not usual to the first `kept` candidates."""
    raise NotImplementedError


@overload(keep_by_others)
def _keep_by_others(ids, scores, weights, kept, warpers, r):
    if is_a(warpers, UsualWarpers):
        return lambda ids, scores, weights, kept, warpers, r: kept
    return _filter_by_others


def _filter_by_others(ids, scores, weights, kept, warpers, r):
    if warpers.min_p[r] > 0:
        kept = _keep_min_p(ids[:kept], scores, weights, np.float32(warpers.min_p[r]))
    if warpers.typical_p[r] < 1:
        kept = _keep_typical(ids[:kept], scores, weights, np.float32(warpers.typical_p[r]))
    if warpers.epsilon_cutoff[r] > 0:
        kept = _cut_off(ids[:kept], scores, weights, np.float32(warpers.epsilon_cutoff[r]))
    if warpers.eta_cutoff[r] > 0:
        kept = _cut_off(ids[:kept], scores, weights, _eta(scores[:kept], weights, np.float32(warpers.eta_cutoff[r])))
    return kept


@jit
def keep_top_k(ids, scores, top_k):
    """Keep the k greatest scores, and those tied with the k-th."""
    threshold = kth_greatest(scores, top_k)
    kept = 0
    for i in range(scores.size):
        if scores[i] >= threshold:
            ids[kept], scores[kept] = ids[i], scores[i]
            kept += 1
    return kept


def keep_top_p(ids, scores, weights, warpers, r):
    """Keep the most probable candidates up to top_p, by row r's rule."""
    raise NotImplementedError


@overload(keep_top_p)
def _keep_top_p(ids, scores, weights, warpers, r):
    if is_a(warpers, UsualWarpers):
        return _keep_top_p_hf
    return _keep_top_p_by_rule


def _keep_top_p_by_rule(ids, scores, weights, warpers, r):
    rule, goal = warpers.top_p_rule[r], np.float32(warpers.top_p[r])
    if rule == HF:
        return _keep_above(ids, scores, weights, warpers.top_p[r])
    probabilities, is_upwards = _normalise(weights[: ids.size]), np.bool_(False)
    border, before = _find_border(scores[: ids.size], probabilities, goal, is_upwards, rule == FASTERTRANSFORMER)
    if rule == OPENAI:
        return _keep_within_p(ids, scores, weights, probabilities, goal, border, before)
    return _keep_part_within_p(ids, scores, weights, probabilities, goal, border, before)


def _keep_top_p_hf(ids, scores, weights, warpers, r):
    return _keep_above(ids, scores, weights, warpers.top_p[r])


@jit
def _keep_above(ids, scores, weights, top_p):
    probabilities, limit = _normalise(weights[: ids.size]), np.float32(1 - top_p)
    is_upwards, is_reached_when_equal = np.bool_(True), np.bool_(False)  # no literals, or it is compiled once more
    border, before = _find_border(scores[: ids.size], probabilities, limit, is_upwards, is_reached_when_equal)
    return _keep_crossing_p(ids, scores, weights, probabilities, limit, border, before)


@jit
def _keep_crossing_p(ids, scores, weights, probabilities, limit, border, removed):
    """The candidates up to some score add up to `limit` and go; of those tied at the border, the first go."""
    ties = count_of(scores[: ids.size], border)
    kept = 0
    for i in range(ids.size):
        stays = scores[i] > border
        if scores[i] == border:
            removed += probabilities[i]
            ties -= 1
            stays = np.float32(removed) > limit or ties == 0
        if stays:
            kept = _keep(ids, scores, weights, i, kept)
    return kept


@jit
def _keep_within_p(ids, scores, weights, probabilities, top_p, border, above):
    """All down to some score add up to `top_p` at most; the border is the first score with which they do not."""
    is_in = border == greatest_of(scores[: ids.size])  # something has to stay
    for i in range(ids.size):
        if scores[i] == border and np.float32(above + probabilities[i]) <= top_p:
            is_in = True  # and all that tie with it
    kept = 0
    for i in range(ids.size):
        if scores[i] > border or (is_in and scores[i] == border):
            kept = _keep(ids, scores, weights, i, kept)
    return kept


@jit
def _keep_part_within_p(ids, scores, weights, probabilities, top_p, border, above):
    """As far as the sum does not reach `top_p`, and of the first that does, the part that is missing."""
    kept, last, part = 0, -1, 1.0
    for i in range(ids.size):
        is_in = scores[i] > border
        if scores[i] == border and np.float32(above) < top_p:
            is_in, last = True, kept
            part = (top_p - np.float32(above)) / np.float64(probabilities[i])
            above += probabilities[i]
        if is_in:
            kept = _keep(ids, scores, weights, i, kept)
    if kept > 1 and last >= 0 and np.float32(above) > top_p:
        scores[last] += np.float32(math.log(part))
        exponentials(scores[:kept], weights)
    return kept


@jit
def _keep_min_p(ids, scores, weights, min_p):
    probabilities = _normalise(weights[: ids.size])
    threshold = min_p * greatest_of(probabilities)
    kept = 0
    for i in range(ids.size):
        if probabilities[i] >= threshold:
            kept = _keep(ids, scores, weights, i, kept)
    return kept


@jit
def _keep_typical(ids, scores, weights, typical_p):
    nearness = np.empty(ids.size, np.float32)  # minus the distance from the expected information
    entropy = _entropy(scores[: ids.size], weights, nearness)
    for i in range(ids.size):
        nearness[i] = -abs(-nearness[i] - entropy)
    probabilities = _normalise(weights[: ids.size])
    is_upwards, is_reached_when_equal = np.bool_(False), np.bool_(True)
    border, _ = _find_border(nearness, probabilities, typical_p, is_upwards, is_reached_when_equal)
    kept = 0
    for i in range(ids.size):
        if nearness[i] >= border:
            kept = _keep(ids, scores, weights, i, kept)
    exponentials(scores[:kept], weights)  # the most probable one may be gone
    return kept


@jit
def _cut_off(ids, scores, weights, cutoff):
    probabilities = _normalise(weights[: ids.size])
    greatest = greatest_of(scores[: ids.size])
    kept = 0
    for i in range(ids.size):
        if probabilities[i] >= cutoff or scores[i] == greatest:
            kept = _keep(ids, scores, weights, i, kept)
    return kept


@jit
def _eta(scores, weights, eta_cutoff):
    entropy = _entropy(scores, weights, np.empty(scores.size, np.float32))
    return min(eta_cutoff, np.sqrt(eta_cutoff) * np.float32(math.exp(-np.float64(entropy))))


@jit
def _keep(ids, scores, weights, i, kept):
    ids[kept], scores[kept], weights[kept] = ids[i], scores[i], weights[i]
    return kept + 1


@jit
def _normalise(weights):
    """The probabilities in float32, which is the precision that the filters compare in."""
    total = sum_of(weights)
    probabilities = np.empty(weights.size, np.float32)
    for i in range(weights.size):
        probabilities[i] = weights[i] / total
    return probabilities


@jit
def _entropy(scores, weights, log_probabilities):
    """The expected -log(probability) in float32, and all log_probabilities (K,) float32 written."""
    greatest, log_total = np.float64(greatest_of(scores)), math.log(sum_of(weights[: scores.size]))
    terms = np.empty(scores.size)
    for i in range(scores.size):
        log_probabilities[i] = scores[i] - greatest - log_total
        held = max(np.float64(log_probabilities[i]), -1e4)  # -inf adds nothing, and 0 * -inf would be NaN
        terms[i] = held * exponential(held)
    return np.float32(-sum_of(terms))


@jit
def _find_border(values, masses, goal, is_upwards, is_reached_when_equal):
    """Going from the greatest value down, or from the least up: where the sum of the masses passes `goal`.

    Returns that value, and the sum of all masses before it. If the sum never passes it, the value where it ends.
    """
    greatest, sign = greatest_of(values), np.float32(-1 if is_upwards else 1)
    sums = np.zeros(BUCKETS)
    for i in range(values.size):
        sums[_bucket_of(greatest - values[i])] += masses[i]
    before, found = 0.0, -1
    for step in range(BUCKETS):
        bucket = BUCKETS - 1 - step if is_upwards else step
        if _passes(before + sums[bucket], goal, is_reached_when_equal):
            found = bucket
            break
        before += sums[bucket]
    if found < 0:
        border = greatest if is_upwards else np.float32(-np.inf)
        return border, before - mass_reaching(values, masses, border)
    inside, their_masses = np.empty(values.size, np.float32), np.empty(values.size, np.float32)
    count = 0
    for i in range(values.size):
        if _bucket_of(greatest - values[i]) == found:
            inside[count], their_masses[count] = sign * values[i], masses[i]
            count += 1
    border = _search(inside[:count], their_masses[:count], before, goal, is_reached_when_equal)
    for i in range(count):
        before += their_masses[i] * (inside[i] > border)
    return sign * border, before


@jit
def _search(values, masses, before, goal, is_reached_when_equal):
    """The greatest value down to which the masses, added to `before`, pass `goal`; all of them do."""
    low, high = key_of(-greatest_of(-values)), key_of(greatest_of(values))
    while low < high:
        middle = (low + high + 1) >> 1
        mass = before + mass_reaching(values, masses, value_of(middle))
        low, high = (middle, high) if _passes(mass, goal, is_reached_when_equal) else (low, middle - 1)
    return value_of(low)


@jit
def _passes(mass, goal, is_reached_when_equal):
    return np.float32(mass) >= goal if is_reached_when_equal else np.float32(mass) > goal


@jit
def _bucket_of(gap):
    return np.int64(min(gap * BUCKETS_PER_UNIT, np.float32(BUCKETS - 1)))
