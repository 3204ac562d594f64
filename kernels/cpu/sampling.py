"""From logits to a token, as in the reference. R rows, one for each token to choose, V vocabulary.

Kernels do argmax, temperature, top-k, top-p, min-p, penalties and bias.
"""

import math

import numpy as np

from ..numbers import multiply_high, philox
from .jit import inline, kernel
from .sampling_rows import (
    divide,
    exponentials,
    find_border,
    greatest_of,
    kth_greatest,
    new_buffers,
    sum_of,
    work_in,
)

NO_ROWS = np.empty((0, 0), np.float32)
NO_TOKENS = np.empty(0, np.int32)
NO_NUMBERS = np.empty((3, 0), np.uint64)
STRIDE = 1024  # of a draw's search, before single weights


def sample(logits, warpers, seeds, sample_indices, positions):
    logits = np.ascontiguousarray(logits, np.float32)
    num_drawn = np.count_nonzero(warpers.temperature)
    token_ids = np.empty(len(logits), np.int32)
    if num_drawn < len(logits):
        token_ids[:] = _greatest(logits, warpers.num_tokens)
    if num_drawn:
        numbers = np.array([seeds, sample_indices, positions], np.uint64)  # (3, R)
        _warp_rows(logits, warpers, numbers, token_ids, NO_ROWS, new_buffers(logits.shape[1]))
    return token_ids


def filter_logits(logits, warpers):
    logits = np.ascontiguousarray(logits, np.float32)
    filtered = logits.copy()
    if warpers.temperature.any():
        _warp_rows(logits, warpers, NO_NUMBERS, NO_TOKENS, filtered, new_buffers(logits.shape[1]))
    for row, num_tokens in zip(filtered, warpers.num_tokens, strict=True):
        row[int(num_tokens) :] = -np.inf
    return filtered


def top_logprobs(logits, token_id, n):
    logits, buffers = np.ascontiguousarray(logits, np.float32), new_buffers(logits.size)
    summary = np.ones(3)
    _keep_most_probable(logits, min(n, logits.size), buffers, summary)
    greatest = summary[1]
    log_total = math.log(summary[2]) if summary[2] else -math.inf  # no token is possible
    kept = int(summary[0])
    ids = buffers.ids[:kept]
    scores = buffers.singles[0, :kept]
    order = np.argsort(-scores, kind="stable")[:n]
    best = scores[order].astype(np.float64)
    chosen = np.float64(logits[token_id])
    return ids[order], (best - greatest) - log_total, (chosen - greatest) - log_total


def _greatest(logits, num_tokens):
    token_ids = logits.argmax(1)  # of all rows at once: a call for each row takes longer
    for r in np.flatnonzero(token_ids >= num_tokens):
        token_ids[r] = logits[r, : int(num_tokens[r])].argmax()
    is_finite = np.isfinite(logits[np.arange(len(logits)), token_ids])
    return np.where(is_finite, token_ids, -1)


@kernel
def _warp_rows(logits, warpers, numbers, token_ids, filtered, buffers):
    """Filter drawn rows into `filtered` (R, V), or draw token_ids (R,) if `filtered` is (0, 0)."""
    work = work_in(buffers)
    for r in range(logits.shape[0]):
        if warpers.temperature[r] == 0:
            continue
        count = min(np.int64(warpers.num_tokens[r]), logits.shape[1])
        is_finite = divide(logits[r, :count], np.float32(warpers.temperature[r]), work.ids, work.scores)
        if token_ids.size and not is_finite:
            token_ids[r] = -1
            continue
        kept = _keep(warpers, r, count, work)
        if token_ids.size:
            number = uniform(numbers[0, r], numbers[1, r], numbers[2, r])
            token_ids[r] = work.ids[_draw(work.weights[:kept], number)]
            continue
        filtered[r, :] = -np.inf
        for i in range(kept):
            filtered[r, work.ids[i]] = work.scores[i]


@inline
def _keep(warpers, r, count, work):
    kept = count
    if 0 < warpers.top_k[r] < count:
        kept = keep_greatest(work.ids, work.scores[:count], np.int64(warpers.top_k[r]), work)
    exponentials(work.scores[:kept], work.weights)
    if warpers.top_p[r] < 1:
        kept = _keep_top_p(np.float32(1 - warpers.top_p[r]), kept, work)
    if warpers.min_p[r]:
        kept = _keep_min_p(np.float32(warpers.min_p[r]), kept, work)
    return kept


@kernel
def keep_greatest(ids, scores, k, work):
    threshold = kth_greatest(scores, k, work)
    kept = 0
    for i in range(scores.size):
        if scores[i] >= threshold:
            ids[kept], scores[kept] = ids[i], scores[i]
            kept += 1
    return kept


@kernel
def _keep_top_p(limit, count, work):
    """Remove the least probable candidates up to `limit` = 1 - p; of ties the first."""
    scores = work.scores[:count]
    probabilities = work.probabilities
    _normalize(work.weights[:count], probabilities)
    border, removed = find_border(scores, probabilities, limit, work)
    kept = ties = 0
    for i in range(count):
        ties += scores[i] == border
    for i in range(count):
        stays = scores[i] > border
        if scores[i] == border:
            removed += probabilities[i]
            ties -= 1
            stays = np.float32(removed) > limit or ties == 0
        if stays:
            kept = _move(work, i, kept)
    return kept


@kernel
def _keep_min_p(min_p, count, work):
    probabilities = work.probabilities[:count]
    _normalize(work.weights[:count], probabilities)
    threshold = min_p * greatest_of(probabilities)
    kept = 0
    for i in range(count):
        if probabilities[i] >= threshold:
            kept = _move(work, i, kept)
    return kept


@inline
def _move(work, i, kept):
    work.ids[kept], work.scores[kept], work.weights[kept] = work.ids[i], work.scores[i], work.weights[i]
    return kept + 1


@kernel
def _normalize(weights, probabilities):
    total = sum_of(weights)
    for i in range(weights.size):
        probabilities[i] = weights[i] / total


@kernel
def _keep_most_probable(logits, n, buffers, summary):
    """Keep the n most probable tokens, with ties. summary: their number, the greatest logit and the total."""
    work = work_in(buffers)
    divide(logits, np.float32(1), work.ids, work.scores)
    exponentials(work.scores, work.weights)
    summary[0] = keep_greatest(work.ids, work.scores, n, work) if n > 0 else 0
    summary[1] = greatest_of(logits)
    summary[2] = sum_of(work.weights)


@kernel
def _draw(weights, number):
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
        if weights[i] > 0:  # the last one, if rounding leaves the goal unreached
            chosen = i
        if cumulated > goal:
            break
    return chosen


_random_bits = kernel(philox(inline(multiply_high)))


@kernel
def uniform(seed, sample_index, position):
    """Return the reference's `uniform`."""
    return np.float64(_random_bits(seed, sample_index, position)) * 2.0**-53


def process_logits(logits, processors):
    p = processors
    counts = (
        np.any(p.repetition_penalty != 1)
        or np.any(p.frequency_penalty != 0)
        or np.any(p.presence_penalty != 0)
    )
    _process_rows(logits, processors, np.zeros(logits.shape[1] if counts else 0, np.int32))


@kernel
def _process_rows(logits, processors, seen):
    """Apply bias and penalties. `seen` (V,) counts tokens; between rows it is 0."""
    p = processors
    for i in range(p.rows.size):
        scores = logits[p.rows[i]]
        token_ids = p.token_ids.values[p.token_ids.bounds[i] : p.token_ids.bounds[i + 1]]
        for j in range(p.bias_ids.bounds[i], p.bias_ids.bounds[i + 1]):
            scores[p.bias_ids.values[j]] += p.biases.values[j]
        if p.repetition_penalty[i] != 1:
            _penalize_repetition(scores, token_ids, p.repetition_penalty[i], seen)
        frequency = p.frequency_penalty[i]
        presence = p.presence_penalty[i]
        if frequency != 0 or presence != 0:
            _penalize_presence(scores, token_ids[p.num_prompt_tokens[i] :], frequency, presence, seen)


@kernel
def _penalize_repetition(scores, token_ids, penalty, seen):
    for token_id in token_ids:
        if not seen[token_id]:
            seen[token_id] = 1
            score = scores[token_id]
            scores[token_id] = score * penalty if score < 0 else score / penalty
    for token_id in token_ids:
        seen[token_id] = 0


@kernel
def _penalize_presence(scores, new_token_ids, frequency_penalty, presence_penalty, seen):
    for token_id in new_token_ids:
        seen[token_id] += 1
    for token_id in new_token_ids:
        if seen[token_id]:
            scores[token_id] = (
                scores[token_id] - frequency_penalty * np.float32(seen[token_id]) - presence_penalty
            )
            seen[token_id] = 0
