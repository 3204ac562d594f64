"""From logits to a token; the reference's sampling.py says what is computed.

Shapes: R rows, one for each token to choose, V vocabulary.
"""

import math

import numpy as np

from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.sampling.philox import uniform
from tinygpt.kernels.cpu.sampling.row import STRIDE, exponentials, first_of, greatest_of, is_finite, sum_of
from tinygpt.kernels.cpu.sampling.warpers import (
    divide,
    filter_candidates,
    keep_top_k,
    new_candidates,
    usual_if_possible,
)


def sample(logits, warpers, seeds, sample_indices, positions):
    """As the reference's: (R,) int32 tokens, -1 for a row that is not finite."""
    logits, token_ids = np.ascontiguousarray(logits, np.float32), np.empty(len(logits), np.int32)
    is_greedy = warpers.temperature == 0
    if is_greedy.any():
        _take_greatest(logits, is_greedy, token_ids)
    if not is_greedy.all():
        # One type for each argument, or Numba would compile the kernel again for another.
        draws = (np.asarray(numbers, np.uint64) for numbers in (seeds, sample_indices, positions))
        _draw_tokens(logits, usual_if_possible(warpers), *draws, token_ids)
    return token_ids


def top_logprobs(logits, token_id, n):
    """As the reference's: the n most probable ids, their log-probabilities, and that of `token_id`."""
    return _top_logprobs(np.ascontiguousarray(logits, np.float32), token_id, min(n, logits.size))


@jit
def _take_greatest(logits, is_greedy, token_ids):
    for r in range(logits.shape[0]):
        if is_greedy[r]:
            token_ids[r] = first_of(logits[r], greatest_of(logits[r])) if is_finite(logits[r]) else -1


@jit
def _draw_tokens(logits, warpers, seeds, sample_indices, positions, token_ids):
    ids, scores, weights = new_candidates(logits.shape[1])
    for r in range(logits.shape[0]):
        if warpers.temperature[r] == 0:
            continue
        divide(logits[r], np.float32(warpers.temperature[r]), ids, scores)
        if not is_finite(scores):
            token_ids[r] = -1
            continue
        kept = filter_candidates(ids, scores, weights, warpers, r)
        token_ids[r] = ids[_draw(weights[:kept], uniform(seeds[r], sample_indices[r], positions[r]))]


@jit
def _top_logprobs(logits, token_id, n):
    ids, scores, weights = new_candidates(logits.size)
    divide(logits, np.float32(1), ids, scores)
    exponentials(scores, weights)
    log_total = math.log(sum_of(weights))
    greatest = np.float64(greatest_of(logits))
    kept = keep_top_k(ids, scores, n) if n > 0 else 0
    order = np.argsort(-scores[:kept], kind="mergesort")[:n]
    return ids[order], (scores[order] - greatest) - log_total, (logits[token_id] - greatest) - log_total


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
