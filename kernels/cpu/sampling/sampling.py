"""From logits to a token; the reference's sampling.py says what is computed.

Shapes: R rows, one for each token to choose, V vocabulary.
"""

import math

import numpy as np

from tinygpt.kernels.cpu.jit import inline, kernel
from tinygpt.kernels.cpu.sampling.philox import uniform
from tinygpt.kernels.cpu.sampling.row import STRIDE, divide, exponentials, greatest_of, new_buffers, sum_of, work_in
from tinygpt.kernels.cpu.sampling.warpers import (
    UsualWarpers,
    keep_by_all,
    keep_by_usual,
    keep_greatest,
    usual_if_possible,
)

NO_ROWS, NO_TOKENS, NO_NUMBERS = np.empty((0, 0), np.float32), np.empty(0, np.int32), np.empty((3, 0), np.uint64)


def sample(logits, warpers, seeds, sample_indices, positions):
    """As the reference's: (R,) int32 tokens, -1 for a row that is not finite."""
    logits, num_drawn = np.ascontiguousarray(logits, np.float32), np.count_nonzero(warpers.temperature)
    token_ids = _greatest(logits) if num_drawn < len(logits) else np.empty(len(logits), np.int32)
    if num_drawn:
        numbers = np.array([seeds, sample_indices, positions], np.uint64)  # (3, R)
        _warp_rows(logits, warpers, numbers, token_ids, NO_ROWS)
    return token_ids


def filter_logits(logits, warpers):
    """As the reference's: (R, V) float32 scores after temperature and all filters, -inf where removed."""
    logits = np.ascontiguousarray(logits, np.float32)
    filtered = logits.copy()
    _warp_rows(logits, warpers, NO_NUMBERS, NO_TOKENS, filtered)
    return filtered


def top_logprobs(logits, token_id, n):
    """As the reference's: the n most probable ids, their log-probabilities, and that of `token_id`."""
    logits, buffers = np.ascontiguousarray(logits, np.float32), new_buffers(logits.size)
    kept, greatest, log_total = _keep_most_probable(logits, min(n, logits.size), buffers)
    ids, scores = buffers.ids[:kept], buffers.singles[0, :kept]
    order = np.argsort(-scores, kind="stable")[:n]
    best, chosen = scores[order].astype(np.float64), np.float64(logits[token_id])
    return ids[order], (best - greatest) - log_total, (chosen - greatest) - log_total


def _greatest(logits):
    """(R,) int32: the first of each row's greatest logits. NaN counts as the greatest, so that it is met here."""
    token_ids = logits.argmax(1)
    is_finite = np.isfinite(logits[np.arange(len(logits)), token_ids])
    return np.where(is_finite, token_ids, -1).astype(np.int32)


def _warp_rows(logits, warpers, numbers, token_ids, filtered):
    """Filter the rows that are not greedy, into `filtered` (R, V), or where that is (0, 0) draw token_ids (R,)."""
    warpers = usual_if_possible(warpers)
    warp = _warp_by_usual if isinstance(warpers, UsualWarpers) else _warp_by_all
    warp(logits, warpers, numbers, token_ids, filtered, new_buffers(logits.shape[1]))


@kernel
def _warp_by_usual(logits, warpers, numbers, token_ids, filtered, buffers):
    work = work_in(buffers)
    for r in range(logits.shape[0]):
        if warpers.temperature[r] != 0 and _begin_row(logits[r], warpers.temperature[r], r, token_ids, work):
            _end_row(r, keep_by_usual(warpers, r, work), numbers, token_ids, filtered, work)


@kernel
def _warp_by_all(logits, warpers, numbers, token_ids, filtered, buffers):
    work = work_in(buffers)
    for r in range(logits.shape[0]):
        if warpers.temperature[r] != 0 and _begin_row(logits[r], warpers.temperature[r], r, token_ids, work):
            _end_row(r, keep_by_all(warpers, r, work), numbers, token_ids, filtered, work)


@inline
def _begin_row(logits, temperature, r, token_ids, work):
    """Make every token of row r a candidate. False, and no token, if it is to be drawn and is not finite."""
    is_finite = divide(logits, np.float32(temperature), work.ids, work.scores)
    if token_ids.size and not is_finite:
        token_ids[r] = -1
    return is_finite or token_ids.size == 0


@inline
def _end_row(r, kept, numbers, token_ids, filtered, work):
    if token_ids.size:
        number = uniform(numbers[0, r], numbers[1, r], numbers[2, r])
        token_ids[r] = work.ids[_draw(work.weights[:kept], number)]
        return
    filtered[r, :] = -np.inf
    for i in range(kept):
        filtered[r, work.ids[i]] = work.scores[i]


@kernel
def _keep_most_probable(logits, n, buffers):
    """The n most probable tokens, and those tied with the last, become candidates.

    Returns how many they are, and what takes a logit to its log-probability: the greatest logit, log of the total.
    """
    work = work_in(buffers)
    divide(logits, np.float32(1), work.ids, work.scores)
    exponentials(work.scores, work.weights)
    log_total = math.log(sum_of(work.weights))
    kept = keep_greatest(work.ids, work.scores, n, work.room) if n > 0 else 0
    return kept, np.float64(greatest_of(logits)), log_total


@kernel
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
