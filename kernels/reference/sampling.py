"""From logits to a token: Hugging Face's processors and warpers, a draw, and log-probabilities.

Filters compare probabilities in float32 and sum in float64. R rows, one for each token to choose, V vocabulary.
"""

import numpy as np

MAX_LOG = 88.7228391  # of a float32


def process_logits(logits, processors):
    """Process rows of `logits` (R, V) float32 in place, in the order of `generate` and of vLLM's penalties."""
    for i, r in enumerate(processors.rows):
        process_row(logits[r], processors, i)


def process_row(scores, processors, i):
    p = processors
    token_ids = processors.token_ids.part(i)
    new_token_ids = token_ids[p.num_prompt_tokens[i] :]
    add_bias(scores, p.bias_ids.part(i), p.biases.part(i))
    penalize_repetition(scores, token_ids, p.repetition_penalty[i])
    penalize_presence(scores, new_token_ids, p.frequency_penalty[i], p.presence_penalty[i])
    penalize_repeats(scores, token_ids, p.dry[i])
    forbid_ngrams(scores, token_ids, p.no_repeat_ngram_size[i])
    allow(scores, p.allowed_ids.part(i))
    scores[p.forbidden_ids.part(i)] = -np.inf


def add_bias(scores, token_ids, biases):
    scores[token_ids] += biases


def penalize_repetition(scores, token_ids, penalty):
    """Divide scores of token_ids, multiply negative scores (Keskar et al., "CTRL", 2019)."""
    present = np.unique(token_ids)
    was = scores[present]
    scores[present] = np.where(was < 0, was * penalty, was / penalty)


def penalize_presence(scores, new_token_ids, frequency_penalty, presence_penalty):
    present, counts = np.unique(new_token_ids, return_counts=True)
    scores[present] -= frequency_penalty * counts.astype(np.float32)
    scores[present] -= presence_penalty


def penalize_repeats(scores, token_ids, dry):
    """Subtract multiplier * base**(n - allowed_length) from a token that came after an earlier copy of the last n.

    DRY, as llama.cpp's: the longest copy counts, n is at least allowed_length, and no copy spans a breaker.
    """
    if dry is None:
        return
    token_ids = token_ids[-dry.penalty_last_n :] if dry.penalty_last_n > 0 else token_ids
    most = num_after_breaker(token_ids.tolist(), dry.breakers)
    last = token_ids.size - 1
    lengths = np.zeros(last, np.int64)
    ends = np.arange(last)  # of the copy that ends at each token but the last
    for n in range(most):
        ends = ends[ends >= n]
        ends = ends[token_ids[ends - n] == token_ids[last - n]]
        lengths[ends] = n + 1
        if not ends.size:
            break
    is_long = lengths >= dry.allowed_length
    followers, index = np.unique(token_ids[1:][is_long], return_inverse=True)
    longest = np.zeros(followers.size, np.int64)
    np.maximum.at(longest, index, lengths[is_long])
    is_penalized = [() not in dry.breakers.get(token_id, ()) for token_id in followers.tolist()]
    base = np.float64(np.float32(dry.base))
    exponents = longest[is_penalized] - dry.allowed_length
    if base > 1:
        exponents = np.minimum(exponents, int(MAX_LOG / np.log(base)))
    with np.errstate(over="ignore"):
        penalties = (np.float32(dry.multiplier) * base**exponents).astype(np.float32)
        scores[followers[is_penalized]] -= penalties


def num_after_breaker(token_ids, breakers):
    """Return how many tokens follow the last breaker; breakers: a breaker's first token -> its others, as tuples."""
    for i in reversed(range(len(token_ids))):
        rests = breakers.get(token_ids[i], ())
        found = [len(rest) for rest in rests if tuple(token_ids[i + 1 : i + 1 + len(rest)]) == rest]
        if found:
            return len(token_ids) - i - 1 - max(found)
    return len(token_ids)


def forbid_ngrams(scores, token_ids, size):
    """Forbid tokens that complete a run of `size` tokens in token_ids."""
    if size == 0 or token_ids.size < size:
        return
    windows = np.lib.stride_tricks.sliding_window_view(token_ids, size)  # (T - size + 1, size)
    begun = token_ids[token_ids.size - size + 1 :]
    repeated = np.all(windows[:, :-1] == begun, axis=1)
    scores[windows[repeated, -1]] = -np.inf


def allow(scores, token_ids):
    if token_ids.size:
        kept = scores[token_ids].copy()
        scores[:] = -np.inf
        scores[token_ids] = kept


def filter_logits(logits, warpers):
    """Return scores (R, V) float32 after temperature and all filters, -inf for removed tokens.

    logits: (R, V) float32, no NaN and no +inf
    warpers: arrays (R,) float64:
        temperature: 0 keeps the row
        top_k: 0 is off; tokens tied with the k-th stay
        top_p: 1 is off; one token always stays
        top_p_rule: 0 (Hugging Face): the token that crosses p stays; of ties the highest ids
            1 (openai/gpt-2): tokens within p, and all tied with the last
            2 (FasterTransformer): the token that crosses p keeps its part within p; of ties the lowest ids
        min_p: the least share of the greatest probability; 0 is off
        typical_p: nearest to the expected -log(probability), with ties (Meister et al., 2022); 1 is off
        epsilon_cutoff: the least probability; the most probable tokens stay; 0 is off
        eta_cutoff: the same with min(eta, sqrt(eta) * e**-entropy) (Hewitt et al., 2022)
        top_n_sigma: standard deviations of the logits below the greatest one (Tang et al., 2024); 0 or less is off
        xtc_threshold: of tokens with at least this probability the least probable one stays, of ties the highest id,
            as in llama.cpp; above 0.5 is off
    """
    return np.stack([filter_row(row, *settings) for row, *settings in zip(logits, *warpers, strict=True)])


def filter_row(
    logits,
    temperature,
    top_k,
    top_p,
    top_p_rule,
    min_p,
    typical_p,
    epsilon_cutoff,
    eta_cutoff,
    top_n_sigma,
    xtc_threshold,
):
    if temperature == 0:
        return logits
    scores = divide(_keep_within_sigmas(logits, top_n_sigma) if top_n_sigma > 0 else logits, temperature)
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
    if xtc_threshold <= 0.5:
        scores = _exclude_top(scores, np.float32(xtc_threshold))
    return scores


def divide(logits, temperature):
    with np.errstate(over="ignore"):
        return logits / np.float32(temperature)


def _keep_within_sigmas(scores, top_n_sigma):
    alive = scores[scores > -np.inf].astype(np.float64)
    return _keep(scores, scores >= np.float32(alive.max() - top_n_sigma * alive.std()))


def _exclude_top(scores, threshold):
    order = np.argsort(-scores, kind="stable")  # most probable first
    count = np.sum((_probabilities(scores) >= threshold) & (scores > -np.inf))
    kept = np.ones(len(scores), bool)
    kept[order[: max(count - 1, 0)]] = False
    return _keep(scores, kept)


def _keep_top_k(scores, top_k):
    kth_largest = np.partition(scores, -top_k)[-top_k]
    return _keep(scores, scores >= kth_largest)


def _keep_top_p(scores, top_p):
    order = np.argsort(scores, kind="stable")  # least probable first
    removed = _cumulated(scores, order) <= np.float32(1 - float(top_p))
    removed[-1] = False
    kept = np.ones(len(scores), bool)
    kept[order[removed]] = False
    return _keep(scores, kept)


def _keep_within_p(scores, top_p):
    order = np.argsort(-scores, kind="stable")  # most probable first
    count = np.sum(_cumulated(scores, order) <= np.float32(top_p))
    return _keep(scores, scores >= scores[order[max(count - 1, 0)]])


def _keep_part_within_p(scores, top_p):
    order = np.argsort(-scores, kind="stable")  # most probable first
    probabilities = _probabilities(scores)
    cumulated = _cumulated(scores, order)
    crossing = min(np.sum(cumulated < np.float32(top_p)), len(scores) - 1)
    kept = np.zeros(len(scores), bool)
    kept[order[: crossing + 1]] = True
    scores = _keep(scores, kept)
    if crossing and cumulated[crossing] > np.float32(top_p):
        last = order[crossing]
        missing = np.float32(top_p) - cumulated[crossing - 1]
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
    weights = exponentials(scores)
    return (weights / weights.sum()).astype(np.float32)


def _cumulated(scores, order):
    return np.cumsum(_probabilities(scores)[order], dtype=np.float64).astype(np.float32)


def _log_probabilities(scores):
    shifted = scores.astype(np.float64) - np.float64(scores.max())
    return (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)


def _entropy(log_probabilities):
    alive = log_probabilities[log_probabilities > -np.inf].astype(np.float64)
    return np.float32(-np.sum(alive * np.exp(alive)))


def exponentials(scores):
    scores = scores.astype(np.float64)
    return np.exp(scores - scores.max())


def sample(logits, warpers, seeds, sample_indices, positions):
    """Return a token (R,) int32 for each row, -1 for a row that is not finite.

    Greedy rows take the largest logit, ties to the lowest id. Others take the first token, by id, whose cumulated
    probability exceeds `uniform` of the seed, the sample's index and the token's position.
    """
    rows = zip(logits, zip(*warpers, strict=True), seeds, sample_indices, positions, strict=True)
    return np.array([_sample_row(*row) for row in rows], dtype=np.int32)


def top_logprobs(logits, token_id, n):
    """Return the n most probable ids, ties to the lowest, their log-probabilities, and token_id's."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    values = scores - np.log(np.exp(scores).sum())
    ids = np.argsort(-values, kind="stable")[:n].astype(np.int32)
    return ids, values[ids], float(values[token_id])


def uniform(seed, sample_index, position, use=0):
    """Return a number in [0, 1), the first of Philox4x64-10 (Salmon et al., SC 2011). use: 0 decides a token."""
    key = np.array([seed, sample_index], np.uint64)
    counter = np.array([position, use, 0, 0], np.uint64)
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
