"""The controls of a step as one array, so that one copy brings them to the device."""

from typing import NamedTuple

import numpy as np

# What each processed row has at the front. `_AT` is where in the array something begins.
NUM_FIELDS = 15
ROW, NUM_PROMPT_TOKENS, NO_REPEAT_NGRAM_SIZE = 0, 1, 2
REPETITION_PENALTY, FREQUENCY_PENALTY, PRESENCE_PENALTY = 3, 4, 5  # the bits of a float32
BIAS_IDS_AT, BIASES_AT, NUM_BIASES = 6, 7, 8
WORD_BOUNDS_AT, NUM_WORDS = 9, 10  # word w is from word_bounds[w] to word_bounds[w + 1] - 1 in this array
ALLOWED_IDS_AT, NUM_ALLOWED_IDS = 11, 12
FORBIDDEN_IDS_AT, NUM_FORBIDDEN_IDS = 13, 14


class PackedControls(NamedTuple):
    """The controls of P rows."""

    controls: np.ndarray  # int32: (P, NUM_FIELDS), then what these point at
    history: np.ndarray  # int32, prompts and outputs end to end
    history_bounds: np.ndarray  # (P, 2) int32, flat: where in `history` a row's tokens begin and end


def pack_controls(controls) -> PackedControls:
    """The tokens lie apart, for a device that chooses several in a row can then add them itself."""
    c = controls
    header = np.empty((len(c.rows), NUM_FIELDS), np.int32)
    parts = [header, c.bias_ids.values, c.biases.values, c.words.bounds, c.words.values]
    parts += [c.allowed_ids.values, c.forbidden_ids.values]
    at = np.cumsum([0, *(part.size for part in parts)])
    header[:, ROW] = c.rows
    header[:, NUM_PROMPT_TOKENS] = c.num_prompt_tokens
    header[:, NO_REPEAT_NGRAM_SIZE] = c.no_repeat_ngram_size
    header[:, REPETITION_PENALTY] = _bits(c.repetition_penalty)
    header[:, FREQUENCY_PENALTY] = _bits(c.frequency_penalty)
    header[:, PRESENCE_PENALTY] = _bits(c.presence_penalty)
    header[:, BIAS_IDS_AT], header[:, NUM_BIASES] = _place(at[1], c.bias_ids.bounds)
    header[:, BIASES_AT] = at[2] + c.biases.bounds[:-1]
    header[:, WORD_BOUNDS_AT], header[:, NUM_WORDS] = _place(at[3], c.word_bounds)
    header[:, ALLOWED_IDS_AT], header[:, NUM_ALLOWED_IDS] = _place(at[5], c.allowed_ids.bounds)
    header[:, FORBIDDEN_IDS_AT], header[:, NUM_FORBIDDEN_IDS] = _place(at[6], c.forbidden_ids.bounds)
    parts[2], parts[3] = _bits(c.biases.values), at[4] + c.words.bounds
    flat = np.concatenate([part.astype(np.int32, copy=False).ravel() for part in parts])
    bounds = np.stack((c.token_ids.bounds[:-1], c.token_ids.bounds[1:]), 1).astype(np.int32)
    return PackedControls(flat, c.token_ids.values.astype(np.int32, copy=False), bounds.ravel())


def _place(at, bounds):
    return at + bounds[:-1], np.diff(bounds)


def _bits(values):
    return np.ascontiguousarray(values, np.float32).view(np.int32)
