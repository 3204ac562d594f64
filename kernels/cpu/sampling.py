"""From logits to a token, without a sort; the reference's sampling.py says what is computed and why.

A row's candidates are three arrays in order of token id: ids, scores (float32) and weights (float64
exponentials, the greatest 1). A filter moves those that stay to the front and returns how many they are.
Shapes: R rows, one for each token to choose, V vocabulary, K candidates of a row.
"""

import math

import numpy as np

from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.philox import uniform
from tinygpt.kernels.cpu.row import (
    STRIDE,
    count_of,
    exponentials,
    first_of,
    greatest_of,
    is_finite,
    key_of,
    kth_greatest,
    mass_below,
    sum_of,
    value_of,
)

# exp(-104) is 0 in float32, the precision of top-p: lower scores have no probability.
NEGLIGIBLE = np.float32(104)


def filter_logits(logits, temperature, top_k, top_p):
    """As the reference's: (R, V) float32 scores after temperature, top-k and top-p, -inf where removed."""
    filtered = np.empty(logits.shape, np.float32)
    _filter_rows(*_rows(logits, temperature, top_k, top_p), filtered)
    return filtered


def sample(logits, temperature, top_k, top_p, seeds, sample_indices, positions):
    """As the reference's: (R,) int32 tokens, -1 for a row that is not finite."""
    token_ids = np.empty(len(logits), np.int32)
    draws = (np.asarray(numbers, np.uint64) for numbers in (seeds, sample_indices, positions))
    _sample_rows(*_rows(logits, temperature, top_k, top_p), *draws, token_ids)
    return token_ids


def top_logprobs(logits, token_id, n):
    """As the reference's: the n most probable ids, their log-probabilities, and that of `token_id`."""
    return _top_logprobs(np.ascontiguousarray(logits, np.float32), token_id, min(n, logits.size))


def _rows(logits, temperature, top_k, top_p):
    """One type for each argument, or Numba would compile the kernels again for another."""
    return (
        np.ascontiguousarray(logits, np.float32),
        np.asarray(temperature, np.float64),
        np.asarray(top_k, np.int64),
        np.asarray(top_p, np.float64),
    )


@jit
def _filter_rows(logits, temperature, top_k, top_p, filtered):
    ids, scores, weights = _candidates(logits.shape[1])
    for r in range(logits.shape[0]):
        if temperature[r] == 0:
            filtered[r] = logits[r]
            continue
        _divide(logits[r], np.float32(temperature[r]), ids, scores)
        kept = _filter(ids, scores, weights, top_k[r], top_p[r])
        filtered[r] = -np.inf
        for i in range(kept):
            filtered[r, ids[i]] = scores[i]


@jit
def _sample_rows(logits, temperature, top_k, top_p, seeds, sample_indices, positions, token_ids):
    # Fresh memory costs more than a greedy row: a page fault for every 4 KiB.
    ids, scores, weights = _candidates(logits.shape[1] if np.any(temperature > 0) else 0)
    for r in range(logits.shape[0]):
        if temperature[r] == 0:
            token_ids[r] = first_of(logits[r], greatest_of(logits[r])) if is_finite(logits[r]) else -1
            continue
        _divide(logits[r], np.float32(temperature[r]), ids, scores)
        if not is_finite(scores):
            token_ids[r] = -1
            continue
        kept = _filter(ids, scores, weights, top_k[r], top_p[r])
        token_ids[r] = ids[_draw(weights[:kept], uniform(seeds[r], sample_indices[r], positions[r]))]


@jit
def _top_logprobs(logits, token_id, n):
    ids, scores, weights = _candidates(logits.size)
    _divide(logits, np.float32(1), ids, scores)
    exponentials(scores, weights)
    log_total = math.log(sum_of(weights))
    greatest = np.float64(greatest_of(logits))
    kept = _keep_top_k(ids, scores, n) if n > 0 else 0
    order = np.argsort(-scores[:kept], kind="mergesort")[:n]
    return ids[order], (scores[order] - greatest) - log_total, (logits[token_id] - greatest) - log_total


@jit
def _candidates(vocab_size):
    return np.empty(vocab_size, np.int32), np.empty(vocab_size, np.float32), np.empty(vocab_size, np.float64)


@jit
def _divide(logits, temperature, ids, scores):
    """Make every token a candidate."""
    for i in range(logits.size):
        ids[i] = i
        scores[i] = logits[i] / temperature


@jit
def _filter(ids, scores, weights, top_k, top_p):
    """Apply top-k and top-p; the number of candidates that stay, with their weights."""
    kept = scores.size
    if 0 < top_k < kept:
        kept = _keep_top_k(ids, scores, top_k)
    exponentials(scores[:kept], weights)
    if top_p < 1:
        kept = _keep_top_p(ids[:kept], scores, weights, top_p)
    return kept


@jit
def _keep_top_k(ids, scores, top_k):
    threshold = kth_greatest(scores, top_k)
    kept = 0
    for i in range(scores.size):
        if scores[i] >= threshold:
            ids[kept], scores[kept] = ids[i], scores[i]
            kept += 1
    return kept


@jit
def _keep_top_p(ids, scores, weights, top_p):
    """The candidates up to some score add up to 1 - p and go; of those tied at the border, the first go."""
    probabilities = _normalise(weights[: ids.size])
    limit = np.float32(1 - top_p)
    border = value_of(_bisect_mass(scores[: ids.size], probabilities, limit))
    removed = mass_below(scores[: ids.size], probabilities, border)
    ties = count_of(scores[: ids.size], border)
    kept = 0
    for i in range(ids.size):
        stays = scores[i] > border
        if scores[i] == border:
            removed += probabilities[i]
            ties -= 1
            stays = np.float32(removed) > limit or ties == 0
        if stays:
            ids[kept], scores[kept], weights[kept] = ids[i], scores[i], weights[i]
            kept += 1
    return kept


@jit
def _bisect_mass(scores, probabilities, limit):
    """The key of the least score that does not go whole: what lies below adds up to `limit` at most."""
    greatest = greatest_of(scores)
    low, high = key_of(greatest - NEGLIGIBLE), key_of(greatest)
    while low < high:
        middle = (low + high + 1) >> 1
        mass = mass_below(scores, probabilities, value_of(middle))
        low, high = (middle, high) if np.float32(mass) <= limit else (low, middle - 1)
    return low


@jit
def _draw(weights, number):
    """The first index at which the cumulated weight exceeds `number` (in [0, 1)) of the total."""
    goal = number * sum_of(weights)
    cumulated, start = 0.0, 0
    while start + STRIDE < weights.size:
        step = sum_of(weights[start : start + STRIDE])
        if cumulated + step > goal:
            break
        cumulated += step
        start += STRIDE
    chosen = start
    for i in range(start, weights.size):
        cumulated += weights[i]
        if weights[i] > 0:  # the last such one, should rounding leave the goal unreached
            chosen = i
        if cumulated > goal:
            break
    return chosen


@jit
def _normalise(weights):
    """The probabilities in float32, which is the precision that top-p counts in."""
    total = sum_of(weights)
    probabilities = np.empty(weights.size, np.float32)
    for i in range(weights.size):
        probabilities[i] = weights[i] / total
    return probabilities
