"""From logits to a token: processors, warpers, a draw that gives the same token on every backend, log-probabilities.

Processors and warpers are Hugging Face's, the penalties OpenAI's. Arithmetic is in float32, one operation at a time;
filters compare probabilities in float32 and add them up in float64. Each looks at the result of the one before.
Shapes: R rows, one for each token to choose, V vocabulary.
"""

import numpy as np


def process_logits(logits, processors):
    """Process rows of `logits` (R, V) float32 in place; `processors` holds their indices, and the settings of each.

    The order is that of Hugging Face's `generate`. logit_bias takes the place of its sequence_bias; the penalties of
    OpenAI follow the repetition penalty, as in vLLM; allowed ids stand where Hugging Face's prefix_allowed_tokens_fn
    does, and forbidden ones are its min_new_tokens and suppress_tokens. A row may come to hold nothing but -inf, even
    where Hugging Face would then allow the allowed ids again.
    """
    for i, r in enumerate(processors.rows):
        process_row(logits[r], processors, i)


def process_row(scores, processors, i):
    """Process one row, scores (V,), by row i of `processors`."""
    p, token_ids = processors, processors.token_ids.part(i)
    new_token_ids = token_ids[p.num_prompt_tokens[i] :]
    add_bias(scores, p.bias_ids.part(i), p.biases.part(i))
    penalize_repetition(scores, token_ids, p.repetition_penalty[i])
    penalize_presence(scores, new_token_ids, p.frequency_penalty[i], p.presence_penalty[i])
    forbid_ngrams(scores, token_ids, p.no_repeat_ngram_size[i])
    for word in range(p.word_bounds[i], p.word_bounds[i + 1]):
        forbid_word(scores, token_ids, p.words.part(word))
    allow(scores, p.allowed_ids.part(i))
    scores[p.forbidden_ids.part(i)] = -np.inf


def add_bias(scores, token_ids, biases):
    """Add biases[j] to the score of token_ids[j]; no id comes twice."""
    scores[token_ids] += biases


def penalize_repetition(scores, token_ids, penalty):
    """Divide the scores of all tokens in token_ids (T,) by `penalty`, or multiply them where they are negative.

    Each once, however often it stands there (Keskar et al., "CTRL", 2019).
    """
    present = np.unique(token_ids)
    was = scores[present]
    scores[present] = np.where(was < 0, was * penalty, was / penalty)


def penalize_presence(scores, new_token_ids, frequency_penalty, presence_penalty):
    """Subtract, for each token in new_token_ids, its count times one penalty, then the other."""
    present, counts = np.unique(new_token_ids, return_counts=True)
    scores[present] -= frequency_penalty * counts.astype(np.float32)
    scores[present] -= presence_penalty


def forbid_ngrams(scores, token_ids, size):
    """Forbid what would complete a run of `size` tokens that token_ids (T,) already holds; 0 forbids nothing."""
    if size == 0 or token_ids.size < size:
        return
    windows = np.lib.stride_tricks.sliding_window_view(token_ids, size)  # (T - size + 1, size)
    begun = token_ids[token_ids.size - size + 1 :]
    repeated = np.all(windows[:, :-1] == begun, axis=1)
    scores[windows[repeated, -1]] = -np.inf


def forbid_word(scores, token_ids, word):
    """Forbid the last id of `word` where token_ids (T,) ends in those before it."""
    begun = word[:-1]
    if token_ids.size >= begun.size and np.array_equal(token_ids[token_ids.size - begun.size :], begun):
        scores[word[-1]] = -np.inf


def allow(scores, token_ids):
    """Forbid all others; where token_ids is empty, none."""
    if token_ids.size:
        kept = scores[token_ids].copy()
        scores[:] = -np.inf
        scores[token_ids] = kept


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
