"""What removes tokens before one is drawn: Hugging Face's warpers, and two other rules for top-p.

Shapes: R rows, one for each token to choose, V vocabulary. The filters compare probabilities in float32, as Hugging
Face's do, but add them up in float64; each looks at what the one before has left.
"""

import numpy as np


def filter_logits(logits, warpers):
    """Scores that give the probabilities of a draw: after temperature and all filters, -inf where a token is removed.

    Equals Hugging Face's warpers applied in turn: temperature, top-k, top-p, min-p, typical, epsilon, eta.

    Args:
        logits: (R, V) float32, no NaN and no +inf; -inf is a token that cannot be chosen
        warpers: arrays (R,) float64:
            temperature: 0 is greedy: the row comes back as it is
            top_k: 0 or V and more is off. Tokens tied with the k-th all stay
            top_p: in (0, 1]; 1 is off. One token always stays
            top_p_rule: what else stays.
                0, Hugging Face's: the token that crosses p. Of several tokens tied there, the highest ids stay, as in
                    a stable ascending sort; torch's sort is stable for rows of 16 tokens or fewer, and above that
                    picks others, though equally many
                1, openai/gpt-2's: what lies within p whole, and all tokens tied with the last that does
                2, FasterTransformer's: the token that crosses p keeps the part of its probability that lies within p.
                    Of several tokens tied there, the lowest ids stay, as in a stable descending sort
            min_p: 0 is off. Tokens less probable than min_p times the most probable one go
            typical_p: 1 is off. The tokens nearest to the expected information -log(probability) stay, the one that
                crosses typical_p included, and all as near as that one (Meister et al., 2022)
            epsilon_cutoff: 0 is off. Less probable tokens go, but for the most probable ones
            eta_cutoff: the same with min(eta, sqrt(eta) * e**-entropy) in place of epsilon (Hewitt et al., 2022)

    Returns:
        (R, V) float32
    """
    return np.stack([filter_row(row, *settings) for row, *settings in zip(logits, *warpers, strict=True)])


def filter_row(logits, temperature, top_k, top_p, top_p_rule, min_p, typical_p, epsilon_cutoff, eta_cutoff):
    """One row of `filter_logits`: (V,) float32."""
    if temperature == 0:
        return logits
    scores = divide(logits, temperature)
    if 0 < top_k < len(scores):
        scores = _keep_top_k(scores, int(top_k))
    if top_p < 1:
        scores = (_keep_top_p, _keep_within_p, _keep_part_within_p)[int(top_p_rule)](scores, top_p)
    if min_p:
        scores = _keep_min_p(scores, np.float32(min_p))
    if typical_p < 1:
        scores = _keep_typical(scores, np.float32(typical_p))
    if epsilon_cutoff:
        scores = _cut_off(scores, np.float32(epsilon_cutoff))
    if eta_cutoff:
        scores = _cut_off(scores, _eta(scores, np.float32(eta_cutoff)))
    return scores


def divide(logits, temperature):
    with np.errstate(over="ignore"):
        return logits / np.float32(temperature)


def _keep_top_k(scores, top_k):
    kth_largest = np.partition(scores, -top_k)[-top_k]
    return _keep(scores, scores >= kth_largest)


def _keep_top_p(scores, top_p):
    """Hugging Face's rule: the least probable tokens go as long as they add up to 1 - p at most."""
    order = np.argsort(scores, kind="stable")  # least probable first
    removed = _cumulated(scores, order) <= np.float32(1 - float(top_p))
    removed[-1] = False
    kept = np.ones(len(scores), bool)
    kept[order[removed]] = False
    return _keep(scores, kept)


def _keep_within_p(scores, top_p):
    """OpenAI's rule: the most probable tokens stay as long as they add up to p at most, and all tied with the last."""
    order = np.argsort(-scores, kind="stable")  # most probable first
    count = np.sum(_cumulated(scores, order) <= np.float32(top_p))
    return _keep(scores, scores >= scores[order[max(count - 1, 0)]])


def _keep_part_within_p(scores, top_p):
    """FasterTransformer's rule: its draw is u * p, looked up in the sums of the probabilities, greatest first."""
    order = np.argsort(-scores, kind="stable")  # most probable first
    probabilities, cumulated = _probabilities(scores), _cumulated(scores, order)
    crossing = min(np.sum(cumulated < np.float32(top_p)), len(scores) - 1)
    kept = np.zeros(len(scores), bool)
    kept[order[: crossing + 1]] = True
    scores = _keep(scores, kept)
    if crossing and cumulated[crossing] > np.float32(top_p):
        last, missing = order[crossing], np.float32(top_p) - cumulated[crossing - 1]
        scores[last] += np.float32(np.log(missing / np.float64(probabilities[last])))
    return scores


def _keep_min_p(scores, min_p):
    probabilities = _probabilities(scores)
    return _keep(scores, probabilities >= min_p * probabilities.max())


def _keep_typical(scores, typical_p):
    log_probabilities = _log_probabilities(scores)
    distances = np.abs(-log_probabilities - _entropy(log_probabilities))
    order = np.argsort(distances, kind="stable")
    crossing = np.sum(_cumulated(scores, order) < typical_p)
    return _keep(scores, distances <= distances[order[min(crossing, len(scores) - 1)]])


def _cut_off(scores, cutoff):
    return _keep(scores, (_probabilities(scores) >= cutoff) | (scores == scores.max()))


def _eta(scores, eta_cutoff):
    entropy = _entropy(_log_probabilities(scores))
    return np.minimum(eta_cutoff, np.sqrt(eta_cutoff) * np.float32(np.exp(-np.float64(entropy))))


def _keep(scores, kept):
    return np.where(kept, scores, np.float32(-np.inf))


def _probabilities(scores):
    """float32, which is the precision that the filters compare in."""
    weights = exponentials(scores)
    return (weights / weights.sum()).astype(np.float32)


def _cumulated(scores, order):
    """The probabilities added up in `order`: in float64, and compared in float32, as torch does it."""
    return np.cumsum(_probabilities(scores)[order], dtype=np.float64).astype(np.float32)


def _log_probabilities(scores):
    shifted = scores.astype(np.float64) - np.float64(scores.max())
    return (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)


def _entropy(log_probabilities):
    """The expected -log(probability), float32; what has no probability adds nothing."""
    alive = log_probabilities[log_probabilities > -np.inf].astype(np.float64)
    return np.float32(-np.sum(alive * np.exp(alive)))


def exponentials(scores):
    """float64 weights in proportion to the probabilities, the largest 1."""
    scores = scores.astype(np.float64)
    return np.exp(scores - scores.max())
