"""What removes tokens before one is drawn, without a sort; the reference's warpers.py says what and why.

A row's candidates are three arrays of `work` in order of token id: ids, scores and weights. A filter moves those that
stay to the front and returns how many they are.
Shapes: R rows, one for each token to choose, V vocabulary, K candidates of a row.
"""

import math
from typing import NamedTuple

import numpy as np

from tinygpt.kernels.cpu.jit import inline, kernel
from tinygpt.kernels.cpu.sampling.row import (
    BUCKETS,
    GREATEST_KEY,
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
# exp(-104) is 0 in float32, the precision of the filters: lower scores have no probability.
BUCKETS_PER_UNIT = np.float32(BUCKETS / 104)
OFF = np.array([[HF], [0], [1], [0], [0]])  # top_p_rule, min_p, typical_p, epsilon_cutoff and eta_cutoff


class UsualWarpers(NamedTuple):
    """The controls that most requests are content with: kernels for these take half the time to compile."""

    temperature: np.ndarray  # (R,)
    top_k: np.ndarray  # (R,)
    top_p: np.ndarray  # (R,) by Hugging Face's rule


def usual_if_possible(warpers):
    """UsualWarpers, if no row of `warpers` asks for more."""
    is_more = (np.array(warpers[3:]) != OFF).any()
    return warpers if is_more else UsualWarpers(*warpers[:3])


@inline
def keep_by_usual(warpers, r, work):
    """Apply row r's filters to all V candidates; the number that stay, with their weights."""
    kept = _keep_top_k(warpers.top_k[r], work)
    if warpers.top_p[r] < 1:
        kept = _keep_above(warpers.top_p[r], kept, work)
    return kept


@inline
def keep_by_all(warpers, r, work):
    """As `keep_by_usual`, with every filter that there is."""
    kept = _keep_top_k(warpers.top_k[r], work)
    if warpers.top_p[r] < 1:
        kept = _keep_top_p_by_rule(warpers.top_p[r], warpers.top_p_rule[r], kept, work)
    if warpers.min_p[r]:
        kept = _keep_min_p(np.float32(warpers.min_p[r]), kept, work)
    if warpers.typical_p[r] < 1:
        kept = _keep_typical(np.float32(warpers.typical_p[r]), kept, work)
    if warpers.epsilon_cutoff[r]:
        kept = _cut_off(np.float32(warpers.epsilon_cutoff[r]), kept, work)
    if warpers.eta_cutoff[r]:
        kept = _cut_off(_eta(np.float32(warpers.eta_cutoff[r]), kept, work), kept, work)
    return kept


@inline
def _keep_top_k(top_k, work):
    kept = work.scores.size
    if 0 < top_k < kept:
        kept = keep_greatest(work.ids, work.scores, np.int64(top_k), work.room)
    exponentials(work.scores[:kept], work.weights)
    return kept


@kernel
def keep_greatest(ids, scores, k, room):
    """Keep the k greatest scores of all, and those tied with the k-th."""
    threshold = kth_greatest(scores, k, room)
    kept = 0
    for i in range(scores.size):
        if scores[i] >= threshold:
            ids[kept], scores[kept] = ids[i], scores[i]
            kept += 1
    return kept


@inline
def _keep_above(top_p, count, work):
    """Keep the most probable of `count` candidates up to top_p, by Hugging Face's rule."""
    limit = np.float32(1 - top_p)
    _normalise(work.weights[:count], work.probabilities)
    is_upwards, is_reached_when_equal = np.bool_(True), np.bool_(False)  # no literals, or it is compiled once more
    scores = work.scores[:count]
    border, removed = _find_border(scores, work.probabilities, limit, is_upwards, is_reached_when_equal, work.room)
    return _keep_crossing_p(work.ids, scores, work.weights, work.probabilities, limit, border, removed)


@kernel
def _keep_top_p_by_rule(top_p, rule, count, work):
    if rule == HF:
        return _keep_above(top_p, count, work)
    goal, scores = np.float32(top_p), work.scores[:count]
    _normalise(work.weights[:count], work.probabilities)
    border, before = _find_border(
        scores, work.probabilities, goal, np.bool_(False), rule == FASTERTRANSFORMER, work.room
    )
    if rule == OPENAI:
        return _keep_within_p(work.ids, scores, work.weights, work.probabilities, goal, border, before)
    return _keep_part_within_p(work.ids, scores, work.weights, work.probabilities, goal, border, before)


@kernel
def _keep_crossing_p(ids, scores, weights, probabilities, limit, border, removed):
    """The candidates up to some score add up to `limit` and go; of those tied at the border, the first go."""
    kept = ties = 0
    for i in range(scores.size):
        ties += scores[i] == border
    for i in range(scores.size):
        stays = scores[i] > border
        if scores[i] == border:
            removed += probabilities[i]
            ties -= 1
            stays = np.float32(removed) > limit or ties == 0
        if stays:
            kept = _keep(ids, scores, weights, i, kept)
    return kept


@kernel
def _keep_within_p(ids, scores, weights, probabilities, top_p, border, above):
    """All down to some score add up to `top_p` at most; the border is the first score with which they do not."""
    is_in = border == greatest_of(scores)  # something has to stay
    for i in range(scores.size):
        if scores[i] == border and np.float32(above + probabilities[i]) <= top_p:
            is_in = True  # and all that tie with it
    kept = 0
    for i in range(scores.size):
        if scores[i] > border or (is_in and scores[i] == border):
            kept = _keep(ids, scores, weights, i, kept)
    return kept


@kernel
def _keep_part_within_p(ids, scores, weights, probabilities, top_p, border, above):
    """As far as the sum does not reach `top_p`, and of the first that does, the part that is missing."""
    kept, last, part = 0, -1, 1.0
    for i in range(scores.size):
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


@inline
def _keep_min_p(min_p, count, work):
    _normalise(work.weights[:count], work.probabilities)
    threshold = min_p * greatest_of(work.probabilities[:count])
    return _keep_reaching(work.probabilities[:count], threshold, work)


@kernel
def _keep_typical(typical_p, count, work):
    nearness = work.nearness[:count]  # minus the distance from the expected information
    entropy = _entropy(nearness, work)
    for i in range(count):
        nearness[i] = -abs(-nearness[i] - entropy)
    _normalise(work.weights[:count], work.probabilities)
    border, _ = _find_border(nearness, work.probabilities, typical_p, np.bool_(False), np.bool_(True), work.room)
    kept = _keep_reaching(nearness, border, work)
    exponentials(work.scores[:kept], work.weights)  # the most probable one may be gone
    return kept


@inline
def _cut_off(cutoff, count, work):
    _normalise(work.weights[:count], work.probabilities)
    _favour(greatest_of(work.scores[:count]), work.scores[:count], work.probabilities)
    return _keep_reaching(work.probabilities[:count], cutoff, work)


@inline
def _eta(eta_cutoff, count, work):
    entropy = _entropy(work.nearness[:count], work)
    return min(eta_cutoff, np.sqrt(eta_cutoff) * np.float32(math.exp(-np.float64(entropy))))


@kernel
def _favour(score, scores, probabilities):
    """Let candidates of this score reach every threshold."""
    for i in range(scores.size):
        probabilities[i] = np.float32(np.inf) if scores[i] == score else probabilities[i]


@kernel
def _keep_reaching(values, threshold, work):
    """Keep the candidates whose value reaches the threshold."""
    kept = 0
    for i in range(values.size):
        if values[i] >= threshold:
            kept = _keep(work.ids, work.scores, work.weights, i, kept)
    return kept


@inline
def _keep(ids, scores, weights, i, kept):
    ids[kept], scores[kept], weights[kept] = ids[i], scores[i], weights[i]
    return kept + 1


@kernel
def _normalise(weights, probabilities):
    """The probabilities in float32, which is the precision that the filters compare in."""
    total = sum_of(weights)
    for i in range(weights.size):
        probabilities[i] = weights[i] / total


@kernel
def _entropy(log_probabilities, work):
    """The expected -log(probability) in float32, and all log_probabilities (K,) float32 written."""
    count = log_probabilities.size
    greatest = np.float64(greatest_of(work.scores[:count]))
    log_total = math.log(sum_of(work.weights[:count]))
    for i in range(count):
        log_probabilities[i] = work.scores[i] - greatest - log_total
        held = max(np.float64(log_probabilities[i]), -1e4)  # -inf adds nothing, and 0 * -inf would be NaN
        work.terms[i] = held * exponential(held)
    return np.float32(-sum_of(work.terms[:count]))


@kernel
def _find_border(values, masses, goal, is_upwards, is_reached_when_equal, room):
    """Going from the greatest value down, or from the least up: where the sum of the masses passes `goal`.

    Returns that value, and the sum of all masses before it. If the sum never passes it, the value where it ends.
    """
    greatest, sign = greatest_of(values), np.float32(-1 if is_upwards else 1)
    room.sums[:] = 0
    for i in range(values.size):
        room.sums[_bucket_of(greatest - values[i])] += masses[i]
    before, found = 0.0, -1
    for step in range(BUCKETS):
        bucket = BUCKETS - 1 - step if is_upwards else step
        if _passes(before + room.sums[bucket], goal, is_reached_when_equal):
            found = bucket
            break
        before += room.sums[bucket]
    if found < 0:
        border = greatest if is_upwards else np.float32(-np.inf)
        return border, before - mass_reaching(values, masses, border)
    count = 0
    for i in range(values.size):
        if _bucket_of(greatest - values[i]) == found:
            room.chosen[count], room.masses[count] = sign * values[i], masses[i]
            count += 1
    inside = room.chosen[:count]
    border = _search(inside, room.masses, before, goal, is_reached_when_equal)
    for i in range(count):
        before += room.masses[i] * (inside[i] > border)
    return sign * border, before


@kernel
def _search(values, masses, before, goal, is_reached_when_equal):
    """The greatest value down to which the masses, added to `before`, pass `goal`; all of them do."""
    low, high = GREATEST_KEY, np.int64(key_of(greatest_of(values)))
    for i in range(values.size):
        key = np.int64(key_of(values[i]))
        low = key if key < low else low
    while low < high:
        middle = (low + high + 1) >> 1
        mass = before + mass_reaching(values, masses, value_of(middle))
        low, high = (middle, high) if _passes(mass, goal, is_reached_when_equal) else (low, middle - 1)
    return value_of(low)


@inline
def _passes(mass, goal, is_reached_when_equal):
    return np.float32(mass) >= goal if is_reached_when_equal else np.float32(mass) > goal


@inline
def _bucket_of(gap):
    return np.int64(min(gap * BUCKETS_PER_UNIT, np.float32(BUCKETS - 1)))
