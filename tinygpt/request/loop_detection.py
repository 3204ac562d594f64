"""Samples that go round in circles."""

from collections.abc import Sequence

from tinygpt.sampling_params import SamplingParams


def is_looping(new_token_ids: Sequence[int], params: SamplingParams) -> bool:
    """Whether the tokens end in one pattern, often enough in a row that params.repetition_detection ends the sample.

    The rule is vLLM's: some pattern of min_pattern_size to max_pattern_size tokens, min_count times, where there are
    min_tokens, and not yet max_tokens, which end a sample in any case.
    """
    detection = params.repetition_detection
    if detection is None or not params.min_tokens <= len(new_token_ids) < params.max_tokens:
        return False
    longest = min(detection.max_pattern_size, len(new_token_ids) // detection.min_count)
    sizes = range(detection.min_pattern_size, longest + 1)
    return any(_repeats(new_token_ids, size, detection.min_count) for size in sizes)


def _repeats(token_ids: Sequence[int], size: int, count: int) -> bool:
    """Whether the last count * size tokens are the last `size`, `count` times: each equals the one `size` before."""
    last = len(token_ids) - 1
    return all(token_ids[i] == token_ids[i - size] for i in range(last, last - (count - 1) * size, -1))
