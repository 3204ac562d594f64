"""What changes the scores before a token is chosen: Hugging Face's processors, and OpenAI's penalties.

Each function changes one row, scores (V,) float32, in place. Arithmetic is in float32, one operation at a time.
"""

import numpy as np


def process_logits(logits, controls):
    """Process rows of `logits` (R, V) float32 in place; `controls` holds which rows, and what for each of them.

    The order is that of Hugging Face's `generate`. logit_bias takes the place of its sequence_bias; the penalties of
    OpenAI follow the repetition penalty, as in vLLM; allowed ids stand where Hugging Face's prefix_allowed_tokens_fn
    does, and forbidden ones are its min_new_tokens and suppress_tokens. A row may come to hold nothing but -inf, even
    where Hugging Face would then allow the allowed ids again.
    """
    for i, r in enumerate(controls.rows):
        scores, token_ids = logits[r], controls.token_ids.part(i)
        new_token_ids = token_ids[controls.num_prompt_tokens[i] :]
        add_bias(scores, controls.bias_ids.part(i), controls.biases.part(i))
        penalise_repetition(scores, token_ids, controls.repetition_penalty[i])
        penalise_presence(scores, new_token_ids, controls.frequency_penalty[i], controls.presence_penalty[i])
        forbid_ngrams(scores, token_ids, controls.no_repeat_ngram_size[i])
        for word in range(controls.word_bounds[i], controls.word_bounds[i + 1]):
            forbid_word(scores, token_ids, controls.words.part(word))
        allow(scores, controls.allowed_ids.part(i))
        scores[controls.forbidden_ids.part(i)] = -np.inf


def add_bias(scores, token_ids, biases):
    """Add biases[j] to the score of token_ids[j]; no id comes twice."""
    scores[token_ids] += biases


def penalise_repetition(scores, token_ids, penalty):
    """Divide the scores of all tokens in token_ids (T,) by `penalty`, or multiply them where they are negative.

    Each once, however often it stands there (Keskar et al., "CTRL", 2019).
    """
    present = np.unique(token_ids)
    was = scores[present]
    scores[present] = np.where(was < 0, was * penalty, was / penalty)


def penalise_presence(scores, new_token_ids, frequency_penalty, presence_penalty):
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
