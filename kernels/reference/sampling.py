"""From logits to a token: a draw that gives the same token wherever it is made, and log-probabilities.

Shapes: R rows, one for each token to choose, V vocabulary.
"""

import numpy as np

from tinygpt.kernels.reference.warpers import divide, exponentials, filter_row


def sample(logits, warpers, seeds, sample_indices, positions):
    """One token per row; a row's token depends on that row alone.

    Greedy rows take the largest logit, ties to the lowest id. In the others, the first token (by id) whose
    cumulated probability exceeds the row's uniform number is drawn.

    Args:
        logits, warpers: as in `filter_logits`
        seeds: (R,) uint64, the request's seed
        sample_indices: (R,) int, which of the request's n samples the row belongs to
        positions: (R,) int, the position in the sequence that the drawn token will have

    Returns:
        (R,) int32; -1 for a row that holds NaN or +inf, or nothing but -inf, before or after temperature
    """
    rows = zip(logits, zip(*warpers, strict=True), seeds, sample_indices, positions, strict=True)
    return np.array([_sample_row(*row) for row in rows], dtype=np.int32)


def top_logprobs(logits, token_id, n):
    """Natural logarithms of the probabilities that logits (V,) stand for.

    Args:
        logits: (V,) float32
        token_id: the token whose log-probability is asked
        n: how many of the most probable tokens to name, ties to the lowest id; V at most are named

    Returns:
        (n,) int32 ids, (n,) float64 values, both best first, and the float value of `token_id`
    """
    scores = logits.astype(np.float64)
    scores -= scores.max()
    values = scores - np.log(np.exp(scores).sum())
    ids = np.argsort(-values, kind="stable")[:n].astype(np.int32)
    return ids, values[ids], float(values[token_id])


def uniform(seed, sample_index, position):
    """The number in [0, 1) that decides one token: no state, so any order of drawing gives the same.

    Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with the key
    (seed, sample index) and the counter `position`; NumPy steps the counter once before the first number.
    """
    key, counter = np.array([seed, sample_index], np.uint64), np.array([position, 0, 0, 0], np.uint64)
    philox = np.random.Philox(key=key, counter=counter)
    return np.random.Generator(philox).random()


def _sample_row(logits, settings, seed, sample_index, position):
    temperature = settings[0]
    scores = logits if temperature == 0 else divide(logits, temperature)
    if not np.isfinite(scores.max()):  # max() hands a NaN on
        return -1
    if temperature == 0:
        return int(np.argmax(scores))
    weights = exponentials(filter_row(logits, *settings))
    cumulated = np.cumsum(weights)
    return int(np.argmax(cumulated > uniform(seed, sample_index, position) * cumulated[-1]))
