"""Prompts and params of calls, checked, and fitted into the model's positions."""

import operator
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import RequestError, invalid
from ..sampling_params import SamplingParams

if TYPE_CHECKING:  # the command line imports this module, and answers --help without the tokenizer
    from ..text.tokenizer import Tokenizer
    from ..weights.adapters.peft import SoftPrompt


@dataclass(frozen=True)
class Prompt:
    text: str | None
    token_ids: list[int]


# A text, token ids, {"prompt": text or ids}, {"prompt_token_ids": ids}, or what read_prompt returned.
PromptType = str | Iterable[int] | dict[str, Any] | Prompt
Prompts = PromptType | Iterable[PromptType]
Params = SamplingParams | Iterable[SamplingParams] | None  # for all prompts, or one for each


@dataclass(frozen=True, eq=False)
class VirtualTokens:
    token_ids: list[int]
    prompt: "SoftPrompt"

    def __len__(self) -> int:
        return len(self.token_ids)


def prompt_list(prompts: Prompts) -> list:
    if isinstance(prompts, (str, Prompt, dict)):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"is {type(prompts).__name__} and must be a text, a list of texts or lists of token ids.",
            "prompts",
        )
    listed = list(prompts)
    return [listed] if listed and all(map(_is_index, listed)) else listed


def text_or_ids(prompt: Any) -> str | list[int]:
    """Return the text or token ids of a prompt, which may be a Prompt or a dict."""
    if isinstance(prompt, Prompt):
        return prompt.token_ids
    if isinstance(prompt, dict):
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            listed = ", ".join(map(repr, prompt)) or "no field"
            raise RequestError(f"a prompt is a dict with {listed}: give one of prompt and prompt_token_ids.")
        (prompt,) = prompt.values()
    return prompt if isinstance(prompt, str) else checked_ids(prompt)


def checked_ids(prompt: Any) -> list[int]:
    if isinstance(prompt, (bytes, dict)) or not isinstance(prompt, Iterable):
        raise RequestError(f"a prompt is {reprlib.repr(prompt)} and must be a text or a list of token ids.")
    items = list(prompt)
    if set(map(type, items)) == {int}:  # nearly always
        return items
    for item in items:
        if not _is_index(item):
            raise RequestError(f"a prompt holds {item!r} where a token id, a whole number, is expected.")
    return [operator.index(item) for item in items]


def _is_index(item: Any) -> bool:
    try:
        operator.index(item)
    except TypeError:  # also of an array
        return False
    return not isinstance(item, bool)


def params_or_fields(params: Any, fields: dict[str, Any]) -> Any:
    """Return `params`, or the SamplingParams of these fields, if a call was given keywords.

    vLLM's name of params is a field, too.
    """
    if params is None and "sampling_params" in fields:
        params = fields.pop("sampling_params")
    if not fields:
        return params
    if params is not None and fields.keys() == {"lora_request"}:  # as in vLLM
        is_one = isinstance(params, SamplingParams)
        return replace(params, **fields) if is_one else [replace(one, **fields) for one in params]
    if params is not None:
        raise RequestError(
            f"{', '.join(fields)} {'is' if len(fields) == 1 else 'are'} given beside params: keywords are one "
            "SamplingParams by themselves, so put them into params."
        )
    return SamplingParams(**fields)


def params_list(params: Params, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    params = list(params) if isinstance(params, Iterable) else [params]
    if not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError("params must be one SamplingParams, or a list with one for each prompt.")
    if len(params) != count:
        raise RequestError(
            f"{count} prompts were given with {len(params)} SamplingParams: give one for each."
        )
    return params


def pairs_of(
    prompts: Prompts, params: Params, fields: dict[str, Any]
) -> Iterable[tuple[PromptType, SamplingParams]]:
    """Return each prompt with its params. fields: the call's keywords."""
    prompts = prompt_list(prompts)
    params = params_or_fields(params, fields)
    return zip(prompts, params_list(params, len(prompts)), strict=True)


def encode(
    text: str, tokenizer: "Tokenizer", vocab_size: int, split_special_tokens: bool | None = None
) -> list[int]:
    return check_ids(tokenizer.encode(text, split_special_tokens), vocab_size, tokenizer)


def check_ids(token_ids: list[int], vocab_size: int, tokenizer: "Tokenizer | None" = None) -> list[int]:
    """Return the token ids. Raise RequestError for one outside the model, with its text if a tokenizer is given."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return token_ids
    outside = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    written = "" if tokenizer is None else f", and the text holds it as {tokenizer.decode([outside])!r}"
    raise RequestError(
        f"token id {outside} is outside the vocabulary: this model knows ids 0 to {vocab_size - 1}{written}."
    )


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError, naming field and id, for token ids that the model does not know."""
    of_field = {
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words_ids": [token_id for word in params.bad_words_ids for token_id in word],
        "eos_token_id": params.eos_token_id or (),
        "logit_bias": [token_id for token_id, _ in params.logit_bias],
        "stop_token_ids": params.stop_token_ids,
        "suppress_tokens": params.suppress_tokens,
        "top_p_reset_ids": params.top_p_reset_ids or (),
    }
    for name, token_ids in of_field.items():
        if outside := [token_id for token_id in token_ids if token_id >= vocab_size]:
            known = f"this model knows ids 0 to {vocab_size - 1}."
            raise RequestError(f"holds token id {outside[0]}, which is outside the vocabulary: {known}", name)


@dataclass(frozen=True)
class Window:
    """The tokens that a sliding sequence still sees: when all positions are full, its oldest tokens leave."""

    size: int  # positions
    stride: int  # tokens that leave at once
    num_fixed: int = 0  # tokens of a soft prompt at the beginning, which never leave

    def num_dropped(self, length: int) -> int:
        """Return how many of a sequence's first `length` tokens have left: a multiple of `stride`."""
        return max(0, -(-(length - self.size) // self.stride)) * self.stride

    def inside(self, token_ids: list[int], num_dropped: int) -> list[int]:
        return token_ids[: self.num_fixed] + token_ids[self.num_fixed + num_dropped :]


@dataclass(frozen=True)
class Fitted:
    """A request whose tokens have positions."""

    prompt: Prompt
    virtual: VirtualTokens | None  # of a soft prompt, in front of the prompt
    token_ids: list[int]  # with a window all of the prompt's: logits processors see tokens that have left it
    params: SamplingParams
    num_truncated: int = 0
    window: Window | None = None

    @property
    def num_virtual(self) -> int:
        return len(self.virtual or ())


def fit(
    prompt: Prompt, virtual: VirtualTokens | None, params: SamplingParams, max_model_len: int, positions: str
) -> Fitted:
    """Make a request fit as its `overflow` says. Raise RequestError if that is impossible.

    positions: their number, as `describe_positions` says it.
    """
    token_ids = prompt.token_ids if virtual is None else virtual.token_ids + prompt.token_ids
    whole = Fitted(prompt, virtual, token_ids, params)
    fitted = _by_overflow(whole, max_model_len)
    if fitted.window is None and len(fitted.token_ids) + fitted.params.max_tokens > max_model_len:
        raise _too_long(whole, max_model_len, positions)
    if fitted.num_truncated and params.prompt_logprobs is not None:
        raise RequestError(
            f"needs the whole prompt, and of its {len(token_ids)} tokens the overflow {params.overflow!r} leaves out "
            f"{fitted.num_truncated}, as {positions}: shorten it.",
            "prompt_logprobs",
        )
    return fitted


def _by_overflow(whole: Fitted, max_model_len: int) -> Fitted:
    """Change tokens, params or window as `overflow` says; the request may still be too long."""
    params = whole.params
    token_ids = whole.token_ids
    room = max_model_len - len(token_ids)
    match params.overflow:
        case "clamp" if 0 < room < params.max_tokens:
            min_tokens = min(params.min_tokens, room)
            return replace(whole, params=replace(params, max_tokens=room, min_tokens=min_tokens))
        case "truncate":
            start = whole.num_virtual
            # One token of the prompt stays at least.
            count = max(0, min(params.max_tokens - room, len(token_ids) - start - 1))
            kept = token_ids[:start] + token_ids[start + count :]
            return replace(whole, token_ids=kept, num_truncated=count)
        case "slide":
            window = _window(params, max_model_len, whole.num_virtual)
            return replace(whole, num_truncated=window.num_dropped(len(token_ids)), window=window)
    return whole


def _window(params: SamplingParams, max_model_len: int, num_fixed: int) -> Window:
    room = max_model_len - num_fixed
    if room < 1:
        raise RequestError(
            f"the soft prompt takes {num_fixed} positions, which never slide, and there are {max_model_len}: give a "
            f"shorter one, of at most {max_model_len - 1}."
        )
    stride = max(room // 2, 1) if params.stride is None else params.stride
    if stride > room:
        raise invalid("stride", stride, f"from 1 to {room}, the positions to slide over")
    return Window(max_model_len, stride, num_fixed)


def _too_long(whole: Fitted, max_model_len: int, positions: str) -> RequestError:
    count = len(whole.token_ids)
    num_virtual = whole.num_virtual
    params = whole.params
    virtual = f" ({num_virtual} of them a soft prompt's)" if num_virtual else ""
    size = f"{count} token{'s' * (count > 1)}{virtual}"
    left = max_model_len - (num_virtual + 1 if params.overflow == "truncate" else count)
    ways = [f"set max_tokens to at most {left}"] if left > 0 else []
    if params.overflow == "refuse":
        ways.append("set overflow to 'clamp', 'truncate' or 'slide'")
    return RequestError(
        f"has {size} and max_tokens is {params.max_tokens}, together {count + params.max_tokens}, but {positions}: "
        f"{', or '.join(['shorten the prompt', *ways])}.",
        "prompt",
    )


def describe_positions(max_model_len: int, n_positions: int) -> str:
    if max_model_len >= n_positions:
        return f"the model has {max_model_len} positions"
    return f"max_model_len is {max_model_len} (the model has {n_positions} positions, and it can be raised to that)"
