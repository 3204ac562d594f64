"""From logits to a token: Hugging Face's processors and warpers, a draw, and log-probabilities.

Filters compare probabilities in float32 and sum in float64. R rows, one for each token to choose, V vocabulary.
A backend has its own `sample`, `process_logits` and `filter_logits`. For a row that asks for more, the sampler calls
the functions of `processors_of` and `filters_of`, whatever the backend is.
"""

from functools import partial

import numpy as np

MAX_LOG = 88.7228391  # of a float32


def process_logits(logits, processors):
    """Add biases to rows of `logits` (R, V) float32 and penalize tokens, in place, in vLLM's order."""
    p = processors
    for i, r in enumerate(p.rows):
        token_ids = p.token_ids.part(i)
        new_token_ids = token_ids[p.num_prompt_tokens[i] :]
        add_bias(logits[r], p.bias_ids.part(i), p.biases.part(i))
        penalize_repetition(logits[r], token_ids, p.repetition_penalty[i])
        penalize_presence(logits[r], new_token_ids, p.frequency_penalty[i], p.presence_penalty[i])


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


def processors_of(params, eos_token_ids, breakers):
    """Return f(prompt_token_ids, new_token_ids, scores) -> scores, one for each field of SamplingParams that is on.

    The order is that of Hugging Face's `generate`. The lists have no soft prompt; scores (V,) may be written to.
    eos_token_ids: of the vocabulary. breakers: as `num_after_breaker` takes them.
    """
    p = params
    dry = partial(
        penalize_repeats,
        multiplier=p.dry_multiplier,
        base=p.dry_base,
        allowed_length=p.dry_allowed_length,
        last_n=p.dry_penalty_last_n,
        breakers=breakers,
    )
    end_ids = _ids([*eos_token_ids, *p.stop_token_ids])  # even with ignore_eos, as in vLLM
    processors = [
        (dry, p.dry_multiplier and p.dry_penalty_last_n),
        (partial(forbid_ngrams, size=p.no_repeat_ngram_size), p.no_repeat_ngram_size),
        (partial(forbid_words, endings=endings_of(p.bad_words_ids, eos_token_ids)), p.bad_words_ids),
        (partial(forbid_at_first, token_ids=end_ids, count=p.min_tokens), p.min_tokens),
        (partial(allow, token_ids=_ids(p.allowed_token_ids or ())), p.allowed_token_ids),
        (partial(forbid, token_ids=_ids(p.suppress_tokens)), p.suppress_tokens),
    ]
    return tuple(process for process, is_on in processors if is_on)


def penalize_repeats(
    prompt_token_ids, new_token_ids, scores, multiplier, base, allowed_length, last_n, breakers
):
    """Subtract multiplier * base**(n - allowed_length) from a token that came after an earlier copy of the last n.

    DRY, as llama.cpp's: the longest copy counts, n is at least allowed_length, and no copy spans a breaker.
    """
    token_ids = _ids(prompt_token_ids + new_token_ids)
    token_ids = token_ids[-last_n:] if last_n > 0 else token_ids
    most = num_after_breaker(token_ids.tolist(), breakers)
    last = token_ids.size - 1
    lengths = np.zeros(last, np.int64)
    ends = np.arange(last)  # of the copy that ends at each token but the last
    for n in range(most):
        ends = ends[ends >= n]
        ends = ends[token_ids[ends - n] == token_ids[last - n]]
        lengths[ends] = n + 1
        if not ends.size:
            break
    is_long = lengths >= allowed_length
    followers, index = np.unique(token_ids[1:][is_long], return_inverse=True)
    longest = np.zeros(followers.size, np.int64)
    np.maximum.at(longest, index, lengths[is_long])
    is_penalized = [() not in breakers.get(token_id, ()) for token_id in followers.tolist()]
    base = np.float32(base)
    exponents = longest[is_penalized] - allowed_length
    if base > 1:
        exponents = np.minimum(exponents, int(MAX_LOG / np.log(base)))
    with np.errstate(over="ignore"):
        penalties = (np.float32(multiplier) * np.float64(base) ** exponents).astype(np.float32)
        scores[followers[is_penalized]] -= penalties
    return scores


def num_after_breaker(token_ids, breakers):
    """Return how many tokens follow the last breaker; breakers: a breaker's first token -> its others, as tuples."""
    for i in reversed(range(len(token_ids))):
        rests = breakers.get(token_ids[i], ())
        lengths = [len(rest) for rest in rests if tuple(token_ids[i + 1 : i + 1 + len(rest)]) == rest]
        if lengths:
            return len(token_ids) - i - 1 - max(lengths)
    return len(token_ids)


def forbid_ngrams(prompt_token_ids, new_token_ids, scores, size):
    """Forbid tokens that complete a run of `size` tokens of the text."""
    token_ids = _ids(prompt_token_ids + new_token_ids)
    if token_ids.size >= size:
        windows = np.lib.stride_tricks.sliding_window_view(token_ids, size)  # (T - size + 1, size)
        begun = token_ids[token_ids.size - size + 1 :]
        repeated = np.all(windows[:, :-1] == begun, axis=1)
        scores[windows[repeated, -1]] = -np.inf
    return scores


def endings_of(words, eos_token_ids):
    """Return {size: {that many token ids of a word's beginning: ids of last tokens}}; EOS alone is no word."""
    endings = {}
    for *beginning, token_id in words:
        if beginning or token_id not in eos_token_ids:
            of_size = endings.setdefault(len(beginning), {})
            of_size.setdefault(tuple(beginning), []).append(token_id)
    return endings


def forbid_words(prompt_token_ids, new_token_ids, scores, endings):
    """Forbid the last token of each word that the text ends with but for it."""
    token_ids = prompt_token_ids + new_token_ids
    for size, of_size in endings.items():
        beginning = tuple(token_ids[max(len(token_ids) - size, 0) :])
        scores[of_size.get(beginning, [])] = -np.inf
    return scores


def forbid_at_first(prompt_token_ids, new_token_ids, scores, token_ids, count):
    if len(new_token_ids) < count:
        scores[token_ids] = -np.inf
    return scores


def forbid(prompt_token_ids, new_token_ids, scores, token_ids):
    scores[token_ids] = -np.inf
    return scores


def allow(prompt_token_ids, new_token_ids, scores, token_ids):
    kept = scores[token_ids].copy()
    scores[:] = -np.inf
    scores[token_ids] = kept
    return scores


def _ids(token_ids):
    return np.array(token_ids, np.int32)


def filter_logits(logits, warpers):
    """Return scores (R, V) float32 after temperature and filters, -inf for removed tokens. No logit is NaN or +inf."""
    rows = zip(logits, _by_row(warpers), strict=True)
    return np.stack([kept_scores(row, int(w.num_tokens), partial(filter_row, w=w)) for row, w in rows])


def kept_scores(logits, num_tokens, keep):
    """Return scores (V,): keep(logits) of the first num_tokens, and -inf."""
    scores = np.full(logits.size, -np.inf, np.float32)
    scores[:num_tokens] = keep(logits[:num_tokens])
    return scores


def _by_row(warpers):
    return map(type(warpers)._make, zip(*warpers, strict=True))


def filter_row(logits, w):
    """Return scores (V,) after the filters that backends compile. `filters_of` has the others."""
    if w.temperature == 0:
        return logits
    scores = divide(logits, w.temperature)
    if w.top_k:
        scores = _keep_top_k(scores, w.top_k)
    if w.top_p < 1:
        scores = _keep_top_p(scores, w.top_p)
    if w.min_p:
        scores = _keep_min_p(scores, w.min_p)
    return scores


def filters_of(params, top_p, excludes_top):
    """Return (f, value) of each field of SamplingParams that is on: scores = f(scores, value), one after another.

    Return none if `filter_logits` has them all. top_p: of this draw. excludes_top: whether XTC takes part in it.
    """
    p = params
    filters = [
        (_keep_within_sigmas, p.top_n_sigma, p.top_n_sigma > 0),
        (divide, p.temperature, True),
        (_keep_top_k, p.top_k, p.top_k > 0),
        (KEEP_P[p.top_p_rule], top_p, top_p < 1),
        (_keep_min_p, p.min_p, p.min_p > 0),
        (_keep_typical, p.typical_p, p.typical_p < 1),
        (_cut_off, p.epsilon_cutoff, p.epsilon_cutoff > 0),
        (_cut_off_eta, p.eta_cutoff, p.eta_cutoff > 0),
        (_exclude_top, p.xtc_threshold, excludes_top),
    ]
    on = [(keep, value) for keep, value, is_on in filters if is_on]
    is_compiled = {keep for keep, _ in on} <= {divide, _keep_top_k, _keep_top_p, _keep_min_p}
    return [] if is_compiled or p.temperature == 0 else on


def filtered(scores, filters):
    for keep, value in filters:
        scores = keep(scores, value)
    return scores


def divide(logits, temperature):
    with np.errstate(over="ignore"):
        return logits / np.float32(temperature)


def _keep_within_sigmas(scores, top_n_sigma):
    """Keep scores within n standard deviations of the greatest one (Tang et al., 2024)."""
    alive = scores[scores > -np.inf].astype(np.float64)
    return _keep(scores, scores >= np.float32(alive.max() - top_n_sigma * alive.std()))


def _exclude_top(scores, threshold):
    """XTC: of tokens with at least this probability, keep the least probable one, of ties the highest id."""
    order = np.argsort(-scores, kind="stable")  # most probable first
    count = np.sum((_probabilities(scores) >= np.float32(threshold)) & (scores > -np.inf))
    kept = np.ones(len(scores), bool)
    kept[order[: max(count - 1, 0)]] = False
    return _keep(scores, kept)


def _keep_top_k(scores, top_k):
    """Keep the k greatest scores, and all that are tied with the last."""
    top_k = int(top_k)
    if top_k >= len(scores):
        return scores
    kth_largest = np.partition(scores, -top_k)[-top_k]
    return _keep(scores, scores >= kth_largest)


def _keep_top_p(scores, top_p):
    """Keep the token that crosses p too; of ties the highest ids (Hugging Face)."""
    order = np.argsort(scores, kind="stable")  # least probable first
    removed = _cumulated(scores, order) <= np.float32(1 - float(top_p))
    removed[-1] = False
    kept = np.ones(len(scores), bool)
    kept[order[removed]] = False
    return _keep(scores, kept)


def _keep_within_p(scores, top_p):
    """Keep tokens within p, and all tied with the last (openai/gpt-2)."""
    order = np.argsort(-scores, kind="stable")  # most probable first
    count = np.sum(_cumulated(scores, order) <= np.float32(top_p))
    return _keep(scores, scores >= scores[order[max(count - 1, 0)]])


def _keep_part_within_p(scores, top_p):
    """Keep the token that crosses p too, with its part within p; of ties the lowest ids (FasterTransformer)."""
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


KEEP_P = {"hf": _keep_top_p, "openai": _keep_within_p, "fastertransformer": _keep_part_within_p}


def _keep_min_p(scores, min_p):
    probabilities = _probabilities(scores)
    return _keep(scores, probabilities >= np.float32(min_p) * probabilities.max())


def _keep_typical(scores, typical_p):
    """Keep tokens nearest to the expected -log(probability), with ties (Meister et al., 2022)."""
    log_probabilities = _log_probabilities(scores)
    distances = np.abs(-log_probabilities - _entropy(log_probabilities))
    order = np.argsort(distances, kind="stable")
    crossing = np.sum(_cumulated(scores, order) < np.float32(typical_p))
    return _keep(scores, distances <= distances[order[min(crossing, len(scores) - 1)]])


def _cut_off(scores, cutoff):
    return _keep(scores, (_probabilities(scores) >= np.float32(cutoff)) | (scores == scores.max()))


def _cut_off_eta(scores, eta_cutoff):
    """Cut off at min(eta, sqrt(eta) * e**-entropy) (Hewitt et al., 2022)."""
    eta = np.float32(eta_cutoff)
    entropy = _entropy(_log_probabilities(scores))
    return _cut_off(scores, np.minimum(eta, np.sqrt(eta) * np.float32(np.exp(-np.float64(entropy)))))


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
    token_ids = []
    for row, w, *draw in zip(logits, _by_row(warpers), seeds, sample_indices, positions, strict=True):
        of_tokens = row[: int(w.num_tokens)]
        token_ids.append(sample_row(of_tokens, w.temperature, partial(filter_row, w=w), *draw))
    return np.array(token_ids, np.int32)


def sample_row(logits, temperature, keep, seed, sample_index, position):
    """Return a token of logits (num_tokens,). keep: logits -> scores, -inf for tokens that are not drawn."""
    scores = logits if temperature == 0 else divide(logits, temperature)
    if not np.isfinite(scores.max()):  # max() hands a NaN on
        return -1
    if temperature == 0:
        return int(np.argmax(scores))
    weights = exponentials(keep(logits))
    cumulated = np.cumsum(weights)
    return int(np.argmax(cumulated > uniform(seed, sample_index, position) * cumulated[-1]))


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
