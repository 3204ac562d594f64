"""What changes the scores before a token is chosen; the reference's processors.py says how and in which order.

Nearly all of it touches only the tokens that are named or have come before, so a row costs what its history does.
`seen` (V,) int32 counts tokens; it is all 0 before and after each use.
"""

import numpy as np

from tinygpt.kernels.cpu.jit import jit


def process_logits(logits, controls):
    """As the reference's: rows of `logits` (R, V) float32 change in place."""
    _process_rows(logits, controls)


@jit
def _process_rows(logits, controls):
    c = controls
    counts = np.any(c.repetition_penalty != 1) or np.any(c.frequency_penalty != 0) or np.any(c.presence_penalty != 0)
    seen = np.zeros(logits.shape[1] if counts else 0, np.int32)
    for i in range(c.rows.size):
        scores, token_ids = logits[c.rows[i]], _part(c.token_ids, i)
        new_token_ids = token_ids[c.num_prompt_tokens[i] :]
        _add_bias(scores, _part(c.bias_ids, i), _part(c.biases, i))
        if c.repetition_penalty[i] != 1:
            _penalise_repetition(scores, token_ids, c.repetition_penalty[i], seen)
        if c.frequency_penalty[i] != 0 or c.presence_penalty[i] != 0:
            _penalise_presence(scores, new_token_ids, c.frequency_penalty[i], c.presence_penalty[i], seen)
        if c.no_repeat_ngram_size[i] > 0:
            _forbid_ngrams(scores, token_ids, c.no_repeat_ngram_size[i])
        for word in range(c.word_bounds[i], c.word_bounds[i + 1]):
            _forbid_word(scores, token_ids, _part(c.words, word))
        _allow(scores, _part(c.allowed_ids, i))
        for token_id in _part(c.forbidden_ids, i):
            scores[token_id] = -np.inf


@jit
def _part(ragged, i):
    return ragged.values[ragged.bounds[i] : ragged.bounds[i + 1]]


@jit
def _add_bias(scores, token_ids, biases):
    for i in range(token_ids.size):
        scores[token_ids[i]] += biases[i]


@jit
def _penalise_repetition(scores, token_ids, penalty, seen):
    for token_id in token_ids:
        if not seen[token_id]:
            seen[token_id] = 1
            score = scores[token_id]
            scores[token_id] = score * penalty if score < 0 else score / penalty
    for token_id in token_ids:
        seen[token_id] = 0


@jit
def _penalise_presence(scores, new_token_ids, frequency_penalty, presence_penalty, seen):
    for token_id in new_token_ids:
        seen[token_id] += 1
    for token_id in new_token_ids:
        if seen[token_id]:
            scores[token_id] = scores[token_id] - frequency_penalty * np.float32(seen[token_id]) - presence_penalty
            seen[token_id] = 0


@jit
def _forbid_ngrams(scores, token_ids, size):
    for start in range(token_ids.size - size + 1):
        if _ends_in(token_ids, token_ids[start : start + size - 1]):
            scores[token_ids[start + size - 1]] = -np.inf


@jit
def _forbid_word(scores, token_ids, word):
    if _ends_in(token_ids, word[: word.size - 1]):
        scores[word[word.size - 1]] = -np.inf


@jit
def _ends_in(token_ids, ending):
    """Backwards, since most differ in the last token."""
    if ending.size > token_ids.size:
        return False
    same = 0
    while same < ending.size and token_ids[token_ids.size - 1 - same] == ending[ending.size - 1 - same]:
        same += 1
    return same == ending.size


@jit
def _allow(scores, token_ids):
    if token_ids.size == 0:
        return
    kept = np.empty(token_ids.size, np.float32)
    for i in range(token_ids.size):
        kept[i] = scores[token_ids[i]]
    scores[:] = -np.inf
    for i in range(token_ids.size):
        scores[token_ids[i]] = kept[i]
