"""max_tokens 0: what the model says of a prompt, with nothing behind it, and of each of its tokens."""

from dataclasses import replace

from tinygpt.outputs import RequestOutput
from tinygpt.request.prompts import Prompt
from tinygpt.sampling_params import SamplingParams


def scoring_request(prompt: Prompt, params: SamplingParams, bos_token_id: int | None) -> tuple[Prompt, SamplingParams]:
    """The prompt without its last token, which is then the only one allowed: so no position is taken for another.

    A prompt of one token stands behind BOS.
    """
    context = prompt.token_ids[:-1] or [prompt.token_ids[0] if bos_token_id is None else bos_token_id]
    forced = SamplingParams(
        max_tokens=1,
        allowed_token_ids=prompt.token_ids[-1:],
        logprobs=params.prompt_logprobs,
        prompt_logprobs=params.prompt_logprobs,
        max_time=params.max_time,
        soft_prompt=params.soft_prompt,
    )
    return replace(prompt, token_ids=context), forced


def scored(prompt: Prompt, params: SamplingParams, output: RequestOutput) -> RequestOutput:
    """What the prompt's own request would have given, if it could generate nothing."""
    [forced] = output.outputs
    found = None
    if output.prompt_logprobs is not None:
        last = forced.logprobs or []
        found = [*output.prompt_logprobs[: len(prompt.token_ids) - len(last)], *last]
    empty = replace(forced, text="", token_ids=[], finish_reason="length", stop_reason=None, logprobs=[])
    samples = [replace(empty, index=i) for i in range(params.n)]
    return replace(output, prompt_token_ids=prompt.token_ids, outputs=samples, prompt_logprobs=found)
