"""`suffix`: of the samples that were made, those that it follows best.

GPT-2 cannot write towards an end that is given. It can say how probable text and suffix are together, so `best_of`
candidates are ranked by that, per token, where there is something to choose.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from tinygpt.outputs import CompletionOutput, RequestOutput
from tinygpt.request.prompts import Prompt
from tinygpt.sampling_params import SamplingParams
from tinygpt.server.refusals.errors import ApiError
from tinygpt.server.work.generation import Generation


def check_suffix(
    prompts: list[Prompt], suffix: Prompt, params: SamplingParams, max_model_len: int, unknown: list[str]
) -> None:
    """Refuse what could be written, but not be read again with the suffix behind it and a position to spare.

    unknown: tokens that texts may hold, and that the model has no row for.
    """
    longest = max(len(prompt.token_ids) for prompt in prompts)
    total = longest + params.max_tokens + len(suffix.token_ids) + 1
    if total > max_model_len:
        raise ApiError(
            400,
            f"this model's context has {max_model_len} tokens, and to try the suffix takes {total}: {longest} of the "
            f"prompt, max_tokens of {params.max_tokens}, {len(suffix.token_ids)} of the suffix and one more.",
            param="suffix",
            code="context_length_exceeded",
        )
    if params.stop and unknown:
        raise ApiError(
            400,
            "a text that a stop string has cut is read again to try the suffix on it, and this model might not be able "
            f"to: it has no row for its tokenizer's {unknown[0]!r}. Leave out stop, or suffix.",
            param="stop",
        )


async def choose(
    generation: Generation,
    outputs: list[RequestOutput],
    suffix: Prompt,
    params: SamplingParams,
    encode: Callable[[str], list[int]],
) -> list[RequestOutput]:
    """The outputs with those n samples that have the highest mean log probability with the suffix behind them."""
    texts = [
        (output, sample, text_ids(sample, params.stop, encode) + suffix.token_ids)
        for output in outputs
        for sample in output.outputs
    ]
    scoring = SamplingParams(max_tokens=1, prompt_logprobs=0)
    prompts = [Prompt(None, output.prompt_token_ids + ids, suffix.cache_salt) for output, _, ids in texts]
    found = await generation.run([(prompt, scoring) for prompt in prompts])
    means = {}
    for (_, sample, ids), reading in zip(texts, found, strict=True):
        entries = zip(reading.prompt_token_ids[-len(ids) :], reading.prompt_logprobs[-len(ids) :], strict=True)
        means[id(sample)] = sum(entry[token_id] for token_id, entry in entries) / len(ids)
    return [replace(output, outputs=_best(output.outputs, means, params.n)) for output in outputs]


def _best(samples: list[CompletionOutput], means: dict[int, float], n: int) -> list[CompletionOutput]:
    ranked = sorted(samples, key=lambda sample: means[id(sample)], reverse=True)[:n]
    return [replace(sample, index=index) for index, sample in enumerate(ranked)]


def text_ids(sample: CompletionOutput, stop: Sequence[str], encode: Callable[[str], list[int]]) -> list[int]:
    """The tokens that its text consists of, without what ended it. stop: the request's stop strings."""
    if sample.stop_reason in stop:  # which may have cut a token
        return encode(sample.text)
    return sample.token_ids[:-1] if isinstance(sample.stop_reason, int) else sample.token_ids
