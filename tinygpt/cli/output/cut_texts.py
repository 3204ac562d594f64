"""What is said of guided texts that ended before they were all that their grammar asks for."""

from collections.abc import Callable, Sequence

from tinygpt.cli.flags.sampling import FLAG_OF
from tinygpt.cli.output.messages import say
from tinygpt.guided_grammar import text_check
from tinygpt.sampling_params import SamplingParams

Ended = tuple[str | None, str | None]  # a text, and its finish reason


def say_cut(params: SamplingParams, samples: Sequence[Ended]) -> None:
    """Of one prompt's samples, in terms of flags."""
    count = num_cut(params, samples)
    if not count:
        return
    guided = FLAG_OF[params.guidance[0]]
    limit = "--max-tokens" if params.max_time is None else "--max-tokens or --max-time"
    which = "the text was" if len(samples) == 1 else f"{count} of {len(samples)} samples were"
    say(f"{which} cut short by {limit}, and not yet what {guided} asks for: raise the limit")


def num_cut(params: SamplingParams, samples: Sequence[Ended], check: Callable = text_check) -> int:
    """How many of them a limit has cut short, so that they are not what the params' guidance allows.

    check: `text_check`, or what keeps its answers for the next prompt.
    """
    cut = [text for text, finish_reason in samples if finish_reason == "length"]
    if not cut or params.guidance is None:
        return 0
    is_allowed = check(*params.guidance)
    return sum(not is_allowed(text) for text in cut)
