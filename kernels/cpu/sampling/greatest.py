"""The greatest logit of each row, found by a step's threads: the next step's token."""

from typing import NamedTuple

import numpy as np

from tinygpt.kernels.cpu.jit import kernel
from tinygpt.kernels.cpu.runtime.team import atomic_load, atomic_store, claim, complete, finish_phase
from tinygpt.kernels.cpu.sampling.rows import GREATEST_KEY, LEAST_KEY, key_of
from tinygpt.kernels.cpu.simd.vector_ir import address, float32_at

MAX_ENDS = 64  # with more, a call is one step
BLOCK = 1024  # scores, 4 KB, in the L1 cache
NOT_A_NUMBER = np.int32(0x7FFFFFFF)  # above every key
ONE = np.int64(1)


class Choices(NamedTuple):
    wanted: np.ndarray  # (1,) int64: steps; 0: only logits
    counts: np.ndarray  # (R,) int64
    token_ids: np.ndarray  # (steps, R) int32; -1: the row is not finite
    ends: np.ndarray  # (MAX_ENDS,) int32: tokens that end a sequence
    num_ends: np.ndarray  # (1,) int64
    has_ended: np.ndarray  # (1,) int64
    stop_early: np.ndarray  # (1,) int64, set by any thread


@kernel
def choose_greatest(team, step, choices, logits):
    """Make the greatest of each row's logits (R, V) the next token of its sequence. A phase."""
    rows = logits.shape[0] if choices.wanted[0] else 0
    items = max(rows, ONE)  # late threads count phases, so an unwanted one has an item
    row = claim(team, items)
    while row >= 0:
        if row < rows:
            token_id = greatest(float32_at(address(logits) + row * logits.shape[1] * 4, logits.shape[1]))
            choices.token_ids[choices.counts[row], row] = token_id
            choices.counts[row] += ONE
            if token_id < 0 or _is_end(token_id, choices):
                atomic_store(address(choices.has_ended), ONE)
            step.token_ids[row] = max(token_id, 0)
            step.positions[row] += 1
        complete(team, items)
        row = claim(team, items)
    finish_phase(team)


@kernel
def _is_end(token_id, choices):
    found = False
    for i in range(choices.num_ends[0]):
        found = found or choices.ends[i] == token_id
    return found


@kernel
def is_last_step(choices):
    return atomic_load(address(choices.stop_early)) + atomic_load(address(choices.has_ended)) > 0


@kernel
def greatest(scores):
    """Return the first of the greatest scores (V,); -1 if one is NaN or +inf, or all are -inf."""
    best, first = np.int32(LEAST_KEY), np.int64(0)
    for start in range(0, scores.size, BLOCK):
        key = _greatest_key(float32_at(address(scores) + start * 4, min(BLOCK, scores.size - start)))
        if key > best:
            best, first = key, start
    if best == LEAST_KEY or best >= GREATEST_KEY:
        return np.int32(-1)
    while _key(scores[first]) != best:
        first += 1
    return np.int32(first)


@kernel
def _greatest_key(scores):
    best = np.int32(LEAST_KEY)
    for i in range(scores.size):
        key = _key(scores[i])
        best = key if key > best else best
    return best


@kernel
def _key(score):
    return key_of(score + np.float32(0)) if score == score else NOT_A_NUMBER
