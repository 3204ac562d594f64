"""The look inside a model: captures, edits, caches of activations, and their pictures."""

import math


def bits(logprob: float) -> float:
    """Return the surprisal of a natural log probability."""
    return -logprob / math.log(2)
