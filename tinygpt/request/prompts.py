"""Prompts as users give them, checked and turned into token ids before any work is done."""

import operator
import reprlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinygpt.errors import RequestError
from tinygpt.sampling_params import SamplingParams
from tinygpt.weights.config import ModelConfig

if TYPE_CHECKING:  # the command line imports this module, and answers --help without the tokenizer
    from tinygpt.tokenizer.tokenizer import Tokenizer

# How a dict, or a line of a file, may spell its prompt.
PROMPT_FIELDS = ("prompt", "prompt_token_ids")


@dataclass(frozen=True)
class Prompt:
    """The text as given, if it was text, and its token ids.

    cache_salt: what is computed of it is shared with prompts of an equal one, and with no others.
    """

    text: str | None
    token_ids: list[int]
    cache_salt: Hashable = None


def prompt_list(prompts: Any) -> list:
    """One text, one list of token ids, one dict of `unsalted`, or a list of these: always as a list of prompts."""
    if isinstance(prompts, (str, Prompt, dict)):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts is {type(prompts).__name__} and must be a text, a list of texts or lists of token ids."
        )
    prompts = list(prompts)
    return [prompts] if prompts and all(_is_index(item) for item in prompts) else prompts


def unsalted(given: Any, cache_salt: Hashable) -> tuple[Any, Hashable]:
    """A prompt without its salt, and the salt; `cache_salt` where it has none of its own. A Prompt is its token ids.

    One that has is a dict, as vLLM's: {"prompt": text or ids, "cache_salt": text}, or "prompt_token_ids" for "prompt".
    """
    if isinstance(given, Prompt):
        return given.token_ids, given.cache_salt
    if not isinstance(given, dict):
        return given, cache_salt
    prompts = [given[name] for name in PROMPT_FIELDS if name in given]
    if len(prompts) != 1 or not given.keys() <= {*PROMPT_FIELDS, "cache_salt"}:
        raise RequestError(
            f"a prompt is a dict with {', '.join(map(repr, given)) or 'no field'}: give one of prompt and "
            "prompt_token_ids, and cache_salt if it is to have one."
        )
    return prompts[0], checked_salt(given.get("cache_salt")) or cache_salt


def checked_salt(cache_salt: Any) -> str | None:
    """A cache salt as given; RequestError unless it is None or a text that is not empty."""
    if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt):
        raise RequestError(
            f"cache_salt is {cache_salt!r} and must be a text that is not empty: leave it out to share with all others "
            "that have none."
        )
    return cache_salt


def read_prompt(
    prompt: Any,
    config: ModelConfig,
    tokenizer_of: Callable[[], "Tokenizer"],
    split_special_tokens: bool | None = None,
    cache_salt: Hashable = None,
) -> Prompt:
    """Encode a text, or check token ids; a Prompt has been read already. An empty prompt starts at the BOS token.

    `tokenizer_of()` returns the tokenizer, or raises the error that says why there is none. split_special_tokens: as
    for `Tokenizer.encode`; token ids have nothing to split. cache_salt: that of a prompt without its own.
    """
    if split_special_tokens is not None:
        from tinygpt.tokenizer.tokenizer import check_switch

        check_switch(split_special_tokens)
    if isinstance(prompt, Prompt):
        if split_special_tokens is not None:
            raise RequestError("split_special_tokens is given with a prompt that has been read already: give its text.")
        return prompt
    prompt, cache_salt = unsalted(prompt, cache_salt)
    if isinstance(prompt, str):
        text, vocab_size = prompt, config.vocab_size
        token_ids = encode(prompt, tokenizer_of(), vocab_size, split_special_tokens) if prompt else []
    else:
        text, token_ids = None, checked_ids(prompt)
        if (outside := _first_outside(token_ids, config.vocab_size)) is not None:
            raise RequestError(f"{_unknown(outside, config.vocab_size)}.")
    if not token_ids:
        if config.bos_token_id is None or not 0 <= config.bos_token_id < config.vocab_size:
            raise RequestError("the prompt is empty and this model has no BOS token to start from: give it some text.")
        token_ids = [config.bos_token_id]
    return Prompt(text, token_ids, cache_salt)


def encode(text: str, tokenizer: "Tokenizer", vocab_size: int, split_special_tokens: bool | None = None) -> list[int]:
    """The token ids of a text. RequestError where one is outside the vocabulary, such as that of a token which was
    added to the tokenizer alone: the model has no row for it."""
    token_ids = tokenizer.encode(text, split_special_tokens)
    if (outside := _first_outside(token_ids, vocab_size)) is not None:
        written = tokenizer.decode([outside])
        raise RequestError(f"{_unknown(outside, vocab_size)}, and the text holds it as {written!r}.")
    return token_ids


def _first_outside(token_ids: Iterable[int], vocab_size: int) -> int | None:
    return next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)


def _unknown(token_id: int, vocab_size: int) -> str:
    return f"token id {token_id} is outside the vocabulary: this model knows ids 0 to {vocab_size - 1}"


def read_ids(
    what: str,
    given: Any,
    config: ModelConfig,
    tokenizer_of: Callable[[], "Tokenizer"],
    max_model_len: int,
    split_special_tokens: bool | None = None,
) -> list[int]:
    """The token ids of a prompt that `what` are wanted of and that nothing is to follow.

    They are read by themselves, so that a cache salt of theirs parts them from nobody.
    Raises RequestError for none, for ids outside the vocabulary and for more than max_model_len.
    """
    if not isinstance(given, Prompt):
        given, _ = unsalted(given, None)
        given = given if isinstance(given, str) else checked_ids(given)
    if not given:
        raise RequestError(f"{what} need at least one token id: the list is empty.")
    token_ids = read_prompt(given, config, tokenizer_of, split_special_tokens).token_ids
    if len(token_ids) > max_model_len:
        raise RequestError(
            f"{len(token_ids)} token ids were given, but {describe_positions(max_model_len, config.n_positions)}: "
            f"give at most {max_model_len}."
        )
    return token_ids


def params_or_fields(params: Any, fields: dict[str, Any]) -> Any:
    """`params`, or in their place the SamplingParams of these fields, which a call may be given as keywords."""
    if not fields:
        return params
    if "sampling_params" in fields:
        raise RequestError("sampling_params is called params here: give params=SamplingParams(...).")
    if params is not None:
        raise RequestError(
            f"{', '.join(fields)} {'is' if len(fields) == 1 else 'are'} given beside params: keywords are one "
            "SamplingParams by themselves, so put them into params."
        )
    return SamplingParams(**fields)


def params_list(params: Any, count: int) -> list[SamplingParams]:
    """One SamplingParams for all prompts, or one for each."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    params = list(params) if isinstance(params, Iterable) else [params]
    if not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError("params must be one SamplingParams, or a list with one for each prompt.")
    if len(params) != count:
        raise RequestError(f"{count} prompts were given with {len(params)} SamplingParams: give one for each.")
    return params


def check_length(
    num_prompt_tokens: int, params: SamplingParams, max_model_len: int, n_positions: int, num_virtual: int = 0
) -> None:
    """Refuse what cannot fit; RequestError with the numbers and the ways out.

    num_virtual: how many of the prompt's tokens are a soft prompt's.
    """
    total = num_prompt_tokens + params.max_tokens
    if total <= max_model_len:
        return
    size = f"{num_prompt_tokens} token{'s' * (num_prompt_tokens > 1)}"
    virtual = f" ({num_virtual} of them a soft prompt's)" if num_virtual else ""
    raise RequestError(
        f"the prompt has {size}{virtual} and max_tokens is {params.max_tokens}, together {total}, but "
        f"{describe_positions(max_model_len, n_positions)}: "
        f"{ways_to_fit(num_prompt_tokens, params.max_tokens, params, max_model_len, num_virtual)}."
    )


def ways_to_fit(
    num_prompt_tokens: int, max_tokens: int, params: SamplingParams, max_model_len: int, num_virtual: int
) -> str:
    """Each of them is enough by itself. max_tokens: 0 where the prompt alone is wanted, all of it."""
    least = num_virtual + 1 if params.overflow == "truncate" else num_prompt_tokens  # tokens of the prompt that stay
    left = max_model_len - least
    room = max_model_len - (1 if params.overflow == "clamp" else max_tokens) - num_virtual
    ways = []
    if room > 0:
        others = " beside the soft prompt's" if num_virtual else ""
        ways.append(f"shorten the prompt to at most {room} token{'s' * (room > 1)}{others}")
    if left > 0:
        ways.append(f"set max_tokens to at most {left}")
    can_truncate = max_model_len - num_virtual > max_tokens > 0 and params.prompt_logprobs is None
    if params.overflow in ("refuse", "clamp") and can_truncate:
        ways.append("set overflow='truncate'")
    elif params.overflow == "refuse" and left > 0:
        ways.append("set overflow='clamp'")
    elif not ways and params.prompt_logprobs is None and params.num_beams == 1 and num_virtual < max_model_len:
        ways.append("set overflow='slide'")
    return ", or ".join(ways) or f"shorten the prompt and max_tokens to at most {max_model_len} together"


def describe_positions(max_model_len: int, n_positions: int) -> str:
    """How many positions there are, for a message: the model's, or fewer where max_model_len was lowered."""
    if max_model_len >= n_positions:
        return f"the model has {max_model_len} positions"
    return f"max_model_len is {max_model_len} (the model has {n_positions} positions, and it can be raised to that)"


def checked_ids(prompt: Any) -> list[int]:
    """A list of whole numbers; RequestError for anything else."""
    if isinstance(prompt, (bytes, dict)) or not isinstance(prompt, Iterable):
        raise RequestError(f"a prompt is {reprlib.repr(prompt)} and must be a text or a list of token ids.")
    items = list(prompt)
    wrong = [item for item in items if not _is_index(item)]
    if wrong:
        raise RequestError(f"a prompt holds {wrong[0]!r} where a token id, a whole number, is expected.")
    return [operator.index(item) for item in items]


def _is_index(item: Any) -> bool:
    if isinstance(item, bool):
        return False
    try:
        operator.index(item)
    except TypeError:
        return False
    return True
