"""Log probabilities as JSON can write them."""

LOWEST = -9999.0  # OpenAI's and vLLM's for minus infinity, for which JSON has no number


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)
