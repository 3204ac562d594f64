"""What a request may ask for where its tokens are more than there are positions."""

from dataclasses import dataclass, replace

from tinygpt.errors import RequestError
from tinygpt.request.prompts import check_length, describe_positions
from tinygpt.sampling_params import SamplingParams


@dataclass(frozen=True)
class Window:
    """What a sequence that goes on for ever still sees: when all positions are full, its oldest tokens leave.

    size: positions. stride: tokens that leave at once; those that stay get new positions, and so new keys and values.
    num_fixed: tokens of a soft prompt at the beginning, which never leave.
    """

    size: int
    stride: int
    num_fixed: int = 0

    def num_dropped(self, length: int) -> int:
        """How many of a sequence's first `length` tokens have left: the least multiple of `stride` that has to."""
        return max(0, -(-(length - self.size) // self.stride)) * self.stride

    def inside(self, token_ids: list[int], num_dropped: int) -> list[int]:
        return token_ids[: self.num_fixed] + token_ids[self.num_fixed + num_dropped :]


@dataclass(frozen=True)
class Fitted:
    """A prompt and its parameters as they fit. `token_ids` are without the num_truncated that are never read.

    Where there is a window, `token_ids` are all of the prompt's: controls go on seeing what has left it.
    """

    token_ids: list[int]
    params: SamplingParams
    num_truncated: int = 0
    window: Window | None = None


def fit(token_ids: list[int], params: SamplingParams, max_model_len: int, n_positions: int) -> Fitted:
    """Make a request fit as its `overflow` says. RequestError, with the numbers, where that is impossible."""
    num_fixed = next((i for i, token_id in enumerate(token_ids) if token_id >= 0), len(token_ids))
    if params.overflow == "slide":
        fitted = _slide(token_ids, params, max_model_len, num_fixed)
    elif params.overflow == "truncate":
        fitted = _truncate(token_ids, params, max_model_len, num_fixed)
    else:
        if params.overflow == "clamp":
            params = _clamp(params, max_model_len - len(token_ids))
        fitted = Fitted(token_ids, params)
    if fitted.window is None and len(fitted.token_ids) + fitted.params.max_tokens > max_model_len:
        check_length(len(token_ids), params, max_model_len, n_positions, num_fixed)
    if fitted.num_truncated and params.prompt_logprobs is not None:
        raise RequestError(
            f"prompt_logprobs need the whole prompt, and of its {len(token_ids)} tokens overflow={params.overflow!r} "
            f"leaves out {fitted.num_truncated}, as {describe_positions(max_model_len, n_positions)}: shorten it."
        )
    return fitted


def window_of(params: SamplingParams, max_model_len: int, num_fixed: int = 0) -> Window | None:
    """The window of a request that slides. RequestError if there are no positions for it, or less than its stride."""
    if params.overflow != "slide":
        return None
    room = max_model_len - num_fixed
    if room < 1:
        raise RequestError(
            f"the soft prompt takes {num_fixed} positions, which never slide, and there are {max_model_len}: give a "
            f"shorter one, of at most {max_model_len - 1}."
        )
    stride = max(room // 2, 1) if params.stride is None else params.stride
    if stride > room:
        raise RequestError(
            f"stride is {stride} and there are {room} positions to slide over: it must be from 1 to {room}."
        )
    return Window(max_model_len, stride, num_fixed)


def _clamp(params: SamplingParams, room: int) -> SamplingParams:
    """The same with max_tokens at most `room`; unchanged, and so refused, where there is no room at all."""
    if not 0 < room < params.max_tokens:
        return params
    return replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))


def _truncate(token_ids: list[int], params: SamplingParams, max_model_len: int, num_fixed: int) -> Fitted:
    """One token of the prompt stays at least; if that is too much, it is refused."""
    num_surplus = len(token_ids) + params.max_tokens - max_model_len
    num_truncated = max(0, min(num_surplus, len(token_ids) - num_fixed - 1))
    return Fitted(token_ids[:num_fixed] + token_ids[num_fixed + num_truncated :], params, num_truncated)


def _slide(token_ids: list[int], params: SamplingParams, max_model_len: int, num_fixed: int) -> Fitted:
    window = window_of(params, max_model_len, num_fixed)
    return Fitted(token_ids, params, window.num_dropped(len(token_ids)), window)
