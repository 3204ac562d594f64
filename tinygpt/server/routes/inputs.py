"""From a request's prompts to the engine's, and how much may follow them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request

from tinygpt.errors import RequestError, TinyGPTError
from tinygpt.request.prompts import Prompt, ways_to_fit
from tinygpt.sampling_params import SamplingParams
from tinygpt.server.protocol.sampling import SamplingFields
from tinygpt.server.record import record_of
from tinygpt.server.refusals.errors import ApiError
from tinygpt.server.refusals.wording import in_words
from tinygpt.server.state import ServerState
from tinygpt.server.work.threads import beside

DEFAULT_MAX_TOKENS = 16  # OpenAI's for completions


def prompt_list(given: Any) -> list[str | list[int]]:
    """One text, one list of ids or a list of these, always as a list of prompts."""
    if given is None or isinstance(given, str):
        return [given or ""]
    return [given] if isinstance(given[0], int) else given


async def read_prompts(
    state: ServerState,
    given: Sequence[str | list[int]],
    split_special_tokens: bool | None = None,
    cache_salt: str | None = None,
    field: str = "prompt",
) -> list[Prompt]:
    """Encoded and checked; long texts in another thread. field: what the request calls them.

    split_special_tokens: None is True: nobody here knows who has written a text.
    """
    is_split = True if split_special_tokens is None else split_special_tokens

    def read() -> list[Prompt]:
        return [state.llm.read_prompt(salted(prompt, cache_salt), is_split) for prompt in given]

    length = sum(len(prompt) for prompt in given if isinstance(prompt, str))
    try:
        return await beside(length, read)
    except TinyGPTError as error:
        raise ApiError(400, str(error), field) from None


async def read_params(state: ServerState, request: Request, form: SamplingFields, **others: Any) -> SamplingParams:
    """others: as SamplingFields.sampling_params has them."""
    return await beside(record_of(request).num_bytes, partial(form.sampling_params, state.encode, **others))


def salted(prompt: str | list[int], cache_salt: str | None) -> Any:
    """As LLM takes a prompt with a salt of its own."""
    return prompt if cache_salt is None else {"prompt": prompt, "cache_salt": cache_salt}


def check_lengths(state: ServerState, prompts: Sequence[Prompt], field: str) -> None:
    """Refuse prompts that are too long to be read, with nothing behind them."""
    longest, limit = max(len(prompt.token_ids) for prompt in prompts), state.llm.max_model_len
    if longest > limit:
        message = f"this model's context has {limit} tokens, and {field} has one of {longest}."
        raise ApiError(400, message, field, "context_length_exceeded")


def default_max_tokens(
    state: ServerState, prompts: Sequence[Prompt], soft_prompt: str | None, most: int | None = DEFAULT_MAX_TOKENS
) -> int:
    """What fits behind the longest prompt, and no more than `most`; 1 where nothing does, to be refused."""
    num_virtual = state.llm.num_virtual_tokens(soft_prompt)
    room = state.llm.max_model_len - num_virtual - max(len(prompt.token_ids) for prompt in prompts)
    return max(room if most is None else min(most, room), 1)


def check_stream(params: SamplingParams) -> None:
    """Refuse what cannot be told before it has ended, as LLM.submit would: but that comes later."""
    if (params.best_of or params.n) > params.n:
        raise RequestError(f"best_of is {params.best_of}, and a stream cannot choose among samples: leave out stream.")
    if params.num_beams > 1:
        raise RequestError(
            f"num_beams is {params.num_beams}, and a search has no text until it ends: leave out stream."
        )


def check_context(
    state: ServerState, form: SamplingFields, prompts: Sequence[Prompt], params: SamplingParams, max_tokens: int
) -> None:
    """Refuse what does not fit, with the numbers; what `overflow` allows is left to the engine."""
    if params.overflow != "refuse":
        return
    num_virtual, limit = state.llm.num_virtual_tokens(params.soft_prompt), state.llm.max_model_len
    longest = num_virtual + max(len(prompt.token_ids) for prompt in prompts)
    if longest + max_tokens > limit:
        virtual = f" ({num_virtual} of them a soft prompt's)" if num_virtual else ""
        ways = ways_to_fit(longest, max_tokens, params, limit, num_virtual)
        sentence = (
            f"this model's context has {limit} tokens, and {longest + max_tokens} were asked for: {longest} in the "
            f"prompt{virtual} and {max_tokens} to generate. {ways.capitalize()}."
        )
        field = form.name_of("prompt" if longest >= limit else "max_tokens")
        raise ApiError(400, in_words(sentence, form), field, "context_length_exceeded")
