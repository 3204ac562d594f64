"""Sequence, one sample of a request, and Request, a prompt with its sequences. They know no arrays and no model."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..errors import FailedRequestError
from ..outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk
from ..sampling_params import SamplingParams
from ..text.stream import TextStream
from .prompts import Prompt
from .sampling_state import Sample, SamplingState, not_finite

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer
    from .guided import Guide
    from .part import Part

FinishReason = Literal["stop", "length"]
NO_PROMPT_LOGPROBS = {"prompt_logprobs": None, "prompt_cumulative_logprob": None}


class SampledToken(NamedTuple):
    """A sequence's next token, or an error in place of one."""

    token_id: int  # -1 if there is an error
    logprobs: dict[int, float] | None = None  # to report: of the most probable tokens and this one
    logprob: float | None = None  # of this one, if it is reported or ranks several samples
    error: str | None = None


@dataclass(eq=False)
class Sequence:
    sample: Sample
    index: int = 0  # within its request
    text: TextStream | None = None  # None if the checkpoint has no tokenizer
    guide: "Guide | None" = None
    parts: "tuple[Part, ...]" = ()
    on_end: Callable[[], None] | None = None  # called once, when the sample has ended by itself

    new_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    score: float | None = None  # of a beam search
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    is_counted: bool = True  # whether its prompt counts as read, besides those of its search
    caller: object = None  # which shares its slots
    slot: int | None = None  # of the KV cache, while it runs
    num_cached: int = 0  # positions in that slot
    num_reused: int = 0  # of these, computed by other sequences before its first token
    num_dropped: int = 0  # tokens that have left the window
    has_finite_logits: bool = False  # after the cached positions: so the positions are finite, too
    scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    sampling_state: SamplingState | None = None

    def __post_init__(self):
        self.params = self.sample.params
        self.prompt_token_ids = self.sample.prompt_token_ids
        if self.sample.window is not None:
            self.num_dropped = self.sample.window.num_dropped(len(self))

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.new_token_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.new_token_ids

    @property
    def context_token_ids(self) -> list[int]:
        """The tokens that the next one depends on, by position."""
        return (
            self.sample.window.inside(self.token_ids, self.num_dropped)
            if self.num_dropped
            else self.token_ids
        )

    @property
    def prefix_ids(self) -> list[int]:
        """The tokens as the prefix cache compares them: positions depend on the adapter, and on edits before them."""
        ids = self.context_token_ids
        shift = (self.sample.adapter + 1) << 32
        if shift:
            ids = [token_id + shift if token_id >= 0 else token_id - shift for token_id in ids]
        for part in self.parts:
            ids = part.prefix_ids(ids)
        return ids

    @property
    def num_uncached(self) -> int:
        return len(self) - self.num_dropped - self.num_cached

    @property
    def max_prefix_tokens(self) -> int:
        """Tokens that may be copied from other sequences: not the last, and none whose logits or rows are wanted."""
        count = self.num_cached + self.num_uncached - 1
        return min([count, *(part.max_prefix_tokens for part in self.parts)])

    @property
    def num_copyable_positions(self) -> int:
        """Positions that other sequences may copy: a NaN spreads backwards to earlier positions of its step."""
        return self.num_cached if self.has_finite_logits and self.error is None else 0

    @property
    def wants_token(self) -> bool:
        """Whether tokens follow the prompt."""
        return self.params.max_tokens > 0

    @property
    def needs_python(self) -> bool:
        """Whether Python must act after its next token: backends take single steps."""
        return self.sample.window is not None or any(part.acts_on_next(self) for part in self.parts)

    @property
    def can_pause(self) -> bool:
        """Whether it can be computed again, unseen."""
        return all(part.can_pause for part in self.parts)

    @property
    def num_together(self) -> int:
        """The number of sequences that run at once or not at all."""
        return max([1, *(part.num_together for part in self.parts)])

    @property
    def first_layer(self) -> int:
        """The layer that its next step begins with."""
        return max([0, *(part.first_layer(self.num_cached) for part in self.parts)])

    def num_part_logits(self, start: int, stop: int) -> int:
        """Return how many of the last positions from `start` to `stop` need a row of logits for a part."""
        return max([0, *(part.num_logits(start, stop) for part in self.parts)])

    def max_count(self, room: int) -> int | float:
        """Return how many of the next tokens need at most `room` rows of logits for a part."""
        return min([math.inf, *(part.max_count(self.num_cached, room) for part in self.parts)])

    @property
    def has_to_slide(self) -> bool:
        return self.sample.window is not None and self.sample.window.num_dropped(len(self)) > self.num_dropped

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def next_token_ids(self, count: int) -> list[int]:
        if self.new_token_ids and self.num_uncached == 1:  # decode, the common case
            return self.new_token_ids[-1:]
        return self.context_token_ids[self.num_cached : self.num_cached + count]

    @property
    def not_finite(self) -> str:
        return not_finite(len(self) - 1, bool(self.params.edits))

    # Its place in the KV cache.

    def enter(self, slot: int, num_cached: int) -> None:
        self.scheduled_time = self.scheduled_time or time.perf_counter()
        self.slot = slot
        self.reuse(num_cached)

    def reuse(self, stop: int) -> None:
        if not self.new_token_ids:
            self.num_reused += stop - self.num_cached
        self.num_cached = stop

    def leave(self) -> None:
        """Forget what was computed, but for tokens."""
        self.num_cached, self.has_finite_logits = 0, False
        if not self.new_token_ids:
            self.num_reused = 0
        for part in self.parts:
            part.restart()

    def slide(self) -> None:
        """Drop the oldest tokens. The others get new positions, so they are computed again."""
        self.num_dropped = self.sample.window.num_dropped(len(self))
        self.num_cached = min(self.num_cached, self.sample.window.num_fixed)
        self.has_finite_logits = False

    # Its tokens, and its end.

    def append(self, token: SampledToken) -> None:
        """Append a sampled token, or fail. Set the finish reason if it was the last one."""
        if self.error is not None or token.error is not None:
            self.error = self.error or token.error
            return
        self.has_finite_logits = True
        if self.first_token_time is None:
            self.first_token_time = time.perf_counter()
        self.new_token_ids.append(token.token_id)
        if self.guide is not None:
            self.guide.take(token.token_id)
        if token.logprobs is not None:
            self.logprobs.append(token.logprobs)
        if token.logprob is not None:
            self.cumulative_logprob += token.logprob
        text = self._push(token.token_id)
        end = self._end()
        if end is not None:
            text += self._finish(*end)
        if self.sample.on_chunk is not None:
            self._give(text, token)

    def continue_as(self, token_ids: list[int], is_another: bool) -> None:
        """Continue as a beam with these new tokens, all cached but the last. is_another: of another sequence."""
        if is_another:
            self.sampling_state = None
        self.new_token_ids = token_ids
        if self.guide is not None:
            self.guide.follow(token_ids)
        self.num_cached = len(self) - 1
        self.first_token_time = self.first_token_time or time.perf_counter()

    def clear_output(self, score: float | None) -> None:
        """Drop all new tokens, to take those of a hypothesis with this score, if there is one."""
        self.new_token_ids, self.score = [], score
        if self.guide is not None:
            self.guide.restart()

    def end_with_prompt(self) -> None:
        """End a sequence that no token follows, once its prompt is computed."""
        if self.error is None:
            self._end_as("length", None)

    def expire(self) -> None:
        """End the sequence as its time is over, with all that run together."""
        for part in self.parts:
            part.expire()
        if not self.is_finished:
            self.end_early()

    def end_early(self) -> None:
        self._end_as("length", "max_time")

    def _end_as(self, reason: FinishReason, stop_reason: str | None) -> None:
        text = self._finish(reason, stop_reason)
        if self.sample.on_chunk is not None:
            self._give(text, None)

    def _push(self, token_id: int) -> str:
        is_silent = token_id in self.sample.end_token_ids and not self.params.include_stop_str_in_output
        if self.text is None or is_silent:
            return ""
        if self.sample.on_chunk is not None or self.params.stop:
            return self.text.push(token_id)
        self.text.push_later(token_id)  # half of a step's time in Python
        return ""

    def _end(self) -> tuple[FinishReason, int | str | None] | None:
        if self.params.stop and self.text.stop is not None:
            return "stop", self.text.stop
        if self.new_token_ids[-1] in self.sample.end_token_ids:
            return "stop", self.new_token_ids[-1]
        if self.guide is not None and self.guide.is_over:
            return "stop", "grammar"
        if is_looping(self.new_token_ids, self.params):
            return "stop", "loop"
        return ("length", None) if len(self.new_token_ids) >= self.params.max_tokens else None

    def _finish(self, reason: FinishReason, stop_reason: int | str | None) -> str:
        """Return the text that was held back, which may still complete a stop string."""
        text = "" if self.text is None else self.text.finish()
        if self.params.stop and self.text.stop is not None:
            reason, stop_reason = "stop", self.text.stop
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.finished_time = time.perf_counter()
        return text

    def _give(self, text: str, token: SampledToken | None) -> None:
        token_id, logprobs = (None, None) if token is None else (token.token_id, copied(token.logprobs))
        is_first = len(self.new_token_ids) == (token is not None)
        chunk = StreamChunk(
            text, token_id, self.finish_reason, self.index, logprobs, stop_reason=self.stop_reason
        )
        for part in self.parts:
            prompt_logprobs = part.request_fields().get("prompt_logprobs") if is_first else None
            if prompt_logprobs is not None:
                chunk = chunk._replace(prompt_logprobs=[copied(entry) for entry in prompt_logprobs])
            if self.is_finished:
                chunk = chunk._replace(**part.sample_fields(self))
        try:
            self.sample.on_chunk(chunk)
        except BaseException as error:  # a user's: it must not reach the step's other sequences
            self.error = f"on_chunk raised {error!r}."


@dataclass(frozen=True)
class Progress:
    num_prompt_tokens: int
    num_cached_tokens: int
    num_new_tokens: int  # of all samples
    metrics: RequestMetrics  # as if it ended now


@dataclass(eq=False)
class Request:
    """A prompt and the sequences that continue it, in order of their index; a single one if all samples are equal."""

    prompt: Prompt
    params: SamplingParams
    sequences: list[Sequence]
    arrival: float = field(default_factory=time.perf_counter)
    num_truncated: int = 0  # tokens of the prompt's beginning that are not read
    tokenizer: "Tokenizer | None" = None  # of the output, which notebooks show by it
    result_of: Callable[[RequestOutput], Any] | None = (
        None  # the output, or made of it: an embedding, a score
    )

    def when_finished(self, call: Callable[[], None]) -> None:
        left = len(self.sequences)

        def end_one() -> None:
            nonlocal left
            left -= 1
            if not left:
                call()

        for sequence in self.sequences:
            sequence.on_end = end_one

    def output(self) -> Any:
        """Return the result of a finished request. Raise FailedRequestError if a sequence failed."""
        first = self.sequences[0]
        errors = [sequence.error for sequence in self.sequences] + [part.error(first) for part in first.parts]
        for error in errors:
            if error is not None:
                raise FailedRequestError(error)
        of_parts = {}
        for part in first.parts:
            of_parts |= part.request_fields()
        output = RequestOutput(
            prompt=self.prompt.text,
            prompt_token_ids=list(self.prompt.token_ids),
            outputs=[_completion(rank, sequence) for rank, sequence in enumerate(self._best())],
            metrics=self._metrics(),
            num_cached_tokens=self._num_cached_tokens(),
            num_truncated_tokens=self.num_truncated,
            **NO_PROMPT_LOGPROBS | of_parts,
        )
        object.__setattr__(output, "tokenizer", self.tokenizer)  # frozen
        return output if self.result_of is None else self.result_of(output)

    def progress(self) -> Progress:
        count = sum(len(s.new_token_ids) for s in self.sequences)
        num_new = count * self.params.n if len(self.sequences) == 1 else count
        return Progress(len(self.prompt.token_ids), self._num_cached_tokens(), num_new, self._metrics())

    def _num_cached_tokens(self) -> int:
        first = self.sequences[0]
        return max(first.num_reused - len(first.sample.soft_prompt or ()), 0)

    def _metrics(self) -> RequestMetrics:
        scheduled = _earliest(s.scheduled_time for s in self.sequences)
        first_token = _earliest(s.first_token_time for s in self.sequences)
        ends = [s.finished_time for s in self.sequences]
        finished = time.perf_counter() if None in ends else max(ends)
        num_steps = max(len(s.new_token_ids) for s in self.sequences)
        return RequestMetrics(self.arrival, scheduled, first_token, finished, num_steps)

    def _best(self) -> list[Sequence]:
        """Return the n sequences of the output. A beam search has ordered its own, and may have fewer."""
        if self.params.num_beams > 1:
            return [s for s in self.sequences if s.score is not None] or self.sequences[: self.params.n]
        if len(self.sequences) == 1:  # all samples are equal
            return self.sequences * self.params.n
        if len(self.sequences) == self.params.n:
            return self.sequences
        best = sorted(self.sequences, key=_mean_logprob, reverse=True)  # stable: the lowest index
        return best[: self.params.n]


def _earliest(times: Iterable[float | None]) -> float | None:
    return min((time for time in times if time is not None), default=None)


def _mean_logprob(sequence: Sequence) -> float:
    count = len(sequence.new_token_ids)
    return sequence.cumulative_logprob / count if count else float("-inf")


def _completion(rank: int, sequence: Sequence) -> CompletionOutput:
    wants_logprobs = sequence.params.logprobs is not None
    of_parts = {}
    for part in sequence.parts:
        of_parts |= part.sample_fields(sequence)
    return CompletionOutput(
        index=rank,
        text=None if sequence.text is None else sequence.text.text,
        token_ids=list(sequence.new_token_ids),
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        logprobs=[copied(entry) for entry in sequence.logprobs] if wants_logprobs else None,
        cumulative_logprob=sequence.cumulative_logprob if wants_logprobs else None,
        score=sequence.score,
        seed=sequence.sample.seed,
        **of_parts,
    )


def copied(logprobs: dict[int, float] | None) -> dict[int, float] | None:
    return None if logprobs is None else dict(logprobs)


def common_prefix(a: list[int], b: list[int]) -> int:
    low = 0  # of the ids that are equal
    high = min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def is_looping(new_token_ids: list[int], params: SamplingParams) -> bool:
    """Return whether params.repetition_detection ends the sample, by vLLM's rule."""
    detection = params.repetition_detection
    length = len(new_token_ids)
    if detection is None or not params.min_tokens <= length < params.max_tokens:
        return False
    longest = min(detection.max_pattern_size, length // detection.min_count)
    for size in range(detection.min_pattern_size, longest + 1):
        first = length - (detection.min_count - 1) * size  # from here on, tokens equal those `size` before
        if all(new_token_ids[i] == new_token_ids[i - size] for i in range(length - 1, first - 1, -1)):
            return True
    return False
