"""What changes the scores before a token is chosen: Hugging Face's processors, and OpenAI's penalties.

Each function changes one row, scores (V,) float32, in place. Arithmetic is in float32, one operation at a time.
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
