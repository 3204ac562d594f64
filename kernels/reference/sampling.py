"""From logits to a token: Hugging Face's filters, and a draw that gives the same token wherever it is made.

Shapes: R rows, one for each token to choose, V vocabulary.
"""

import numpy as np


def filter_logits(logits, temperature, top_k, top_p):
    """Scores after temperature, top-k and top-p, in this order; -inf where a token is removed.

    Equals Hugging Face's TemperatureLogitsWarper, TopKLogitsWarper and TopPLogitsWarper applied in turn.

    Args:
        logits: (R, V) float32, no NaN and no +inf; -inf is a token that cannot be chosen
        temperature: (R,) float64; 0 is greedy: the row comes back as it is
        top_k: (R,) int; 0 or V and more is off. Tokens tied with the k-th all stay
        top_p: (R,) float64 in (0, 1]; 1 is off. The token that crosses p stays, and one token always does.
            Of several tokens tied there, the highest ids stay, as in a stable ascending sort; torch's sort
            is stable for rows of 16 tokens or fewer, and above that picks others, though equally many

    Returns:
        (R, V) float32
    """
    return np.stack([_filter_row(*row) for row in zip(logits, temperature, top_k, top_p, strict=True)])


def sample(logits, temperature, top_k, top_p, seeds, sample_indices, positions):
    """One token per row; a row's token depends on that row alone.

    Greedy rows take the largest logit, ties to the lowest id. In the others, the first token (by id) whose
    cumulated probability exceeds the row's uniform number is drawn.

    Args:
        logits, temperature, top_k, top_p: as in `filter_logits`
        seeds: (R,) uint64, the request's seed
        sample_indices: (R,) int, which of the request's n samples the row belongs to
        positions: (R,) int, the position in the sequence that the drawn token will have

    Returns:
        (R,) int32; -1 for a row that holds NaN or +inf, or nothing but -inf, before or after temperature
    """
    rows = zip(logits, temperature, top_k, top_p, seeds, sample_indices, positions, strict=True)
    return np.array([_sample_row(*row) for row in rows], dtype=np.int32)


def top_logprobs(logits, token_id, n):
    """Natural logarithms of the model's own probabilities, before temperature and filters.

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


def _sample_row(logits, temperature, top_k, top_p, seed, sample_index, position):
    scores = logits if temperature == 0 else _divide(logits, temperature)
    if not np.isfinite(scores.max()):  # max() hands a NaN on
        return -1
    if temperature == 0:
        return int(np.argmax(scores))
    weights = _exponentials(_filter_row(logits, temperature, top_k, top_p))
    cumulated = np.cumsum(weights)
    return int(np.argmax(cumulated > uniform(seed, sample_index, position) * cumulated[-1]))


def _filter_row(logits, temperature, top_k, top_p):
    if temperature == 0:
        return logits
    scores = _divide(logits, temperature)
    if 0 < top_k < len(scores):
        scores = _keep_top_k(scores, top_k)
    if top_p < 1:
        scores = _keep_top_p(scores, top_p)
    return scores


def _divide(logits, temperature):
    with np.errstate(over="ignore"):
        return logits / np.float32(temperature)


def _keep_top_k(scores, top_k):
    kth_largest = np.partition(scores, -top_k)[-top_k]
    return np.where(scores < kth_largest, np.float32(-np.inf), scores)


def _keep_top_p(scores, top_p):
    # The precisions are torch's: float32 probabilities, added up in float64, compared in float32.
    weights = _exponentials(scores)
    probabilities = (weights / weights.sum()).astype(np.float32)
    order = np.argsort(scores, kind="stable")  # least probable first
    cumulated = np.cumsum(probabilities[order], dtype=np.float64).astype(np.float32)
    removed = cumulated <= np.float32(1 - float(top_p))
    removed[-1] = False
    filtered = scores.copy()
    filtered[order[removed]] = -np.inf
    return filtered


def _exponentials(scores):
    """float64 weights in proportion to the probabilities, the largest 1."""
    scores = scores.astype(np.float64)
    return np.exp(scores - scores.max())
