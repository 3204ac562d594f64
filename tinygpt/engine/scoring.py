"""Label scoring: how probable given continuations of a prompt are, rather than which one the model would write."""

from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

from tinygpt.errors import RequestError
from tinygpt.outputs import ContinuationScore
from tinygpt.request.prompts import Prompt, checked_ids, describe_positions, read_prompt
from tinygpt.request.request import Request
from tinygpt.request.sequence import Sequence
from tinygpt.request.soft_prompts import VirtualTokens
from tinygpt.sampling.prompt_logprobs import PromptLogprobs
from tinygpt.sampling_params import SamplingParams
from tinygpt.tokenizer.tokenizer import Tokenizer
from tinygpt.weights.config import ModelConfig


def read_continuations(
    prompt: Any,
    continuations: Seq[Any],
    config: ModelConfig,
    tokenizer_of: Callable[[], Tokenizer],
    split_special_tokens: bool | None,
) -> Iterator[tuple[list[int], list[int]]]:
    """Of each continuation: the ids of what comes before it, and its own. `LLM.score` says what belongs to which."""
    prompt = _text_or_ids(prompt)
    for continuation in map(_text_or_ids, continuations):
        if not continuation:
            raise RequestError("a continuation is empty: give each some text, or a token id at least.")
        before, are_texts = prompt, isinstance(prompt, str) and isinstance(continuation, str)
        if are_texts:
            before = prompt.rstrip()
            continuation = prompt[len(before) :] + continuation
        context = read_prompt(before, config, tokenizer_of, split_special_tokens).token_ids
        token_ids = read_prompt(continuation, config, tokenizer_of, split_special_tokens).token_ids
        if are_texts and before:
            whole = tokenizer_of().encode(before + continuation, split_special_tokens)
            if whole[: len(context)] == context and len(whole) > len(context):
                token_ids = whole[len(context) :]
        yield context, token_ids


def _text_or_ids(given: Any) -> str | list[int]:
    given = given.token_ids if isinstance(given, Prompt) else given
    return given if isinstance(given, str) else checked_ids(given)


def scoring_request(
    context: list[int],
    continuation: list[int],
    virtual: VirtualTokens | None,
    cache_salt: Hashable,
    max_model_len: int,
    n_positions: int,
) -> Request:
    """A request that reads a prompt and all of a continuation but its last token, whose logits are not needed.

    A sequence draws a token where its prompt ends, so one is drawn and left alone.
    """
    context = [*(virtual.token_ids if virtual else ()), *context]
    if len(context) + len(continuation) > max_model_len + 1:
        raise RequestError(
            f"the prompt has {len(context)} tokens and a continuation {len(continuation)}, together "
            f"{len(context) + len(continuation)}, but {describe_positions(max_model_len, n_positions)}: shorten them "
            f"to {max_model_len + 1} tokens together, the last of which needs no position."
        )
    token_ids, params = context + continuation[:-1], SamplingParams(max_tokens=1)
    sequence = Sequence(
        token_ids,
        params,
        seed=0,
        index=0,
        eos_token_ids=frozenset(),
        text=None,
        soft_prompt=virtual,
        prompt_logprobs=PromptLogprobs(len(context) - 1, continuation, num_best=1),
        cache_salt=cache_salt,
    )
    return Request(Prompt(None, token_ids), params, [sequence])


def score_of(request: Request) -> ContinuationScore:
    """What a finished `scoring_request` has found."""
    wanted = request.sequences[0].prompt_logprobs
    best = [next(iter(found)) for found in wanted.found]  # the most probable comes first
    return ContinuationScore(wanted.targets, wanted.logprobs, is_greedy=wanted.targets == best)
