"""The look inside a model: captures, edits, caches of activations, and their pictures."""

import math

# The model's outputs as points of capture, by transformers' names.
LAST_HIDDEN_STATE, LOGITS = OUTPUTS = "last_hidden_state", "logits"


def bits(logprob: float) -> float:
    """Return the surprisal of a natural log probability."""
    return -logprob / math.log(2)
