"""Sequence: the bookkeeping of one sample: its tokens, how many of them are cached, when it ends."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from tinygpt.outputs import StreamChunk
from tinygpt.request.loop_detection import is_looping
from tinygpt.request.soft_prompts import VirtualTokens
from tinygpt.request.truncation import Window
from tinygpt.sampling_params import SamplingParams
from tinygpt.tokenizer.text_stream import TextStream

if TYPE_CHECKING:  # for annotations alone: both lie above this folder
    from tinygpt.engine.beams import Beams
    from tinygpt.sampling.guided import Guide
    from tinygpt.sampling.metadata import SamplingState
    from tinygpt.sampling.prompt_logprobs import PromptLogprobs


class SampledToken(NamedTuple):
    """What the sampler gives a sequence: its next token, or an error in place of one."""

    token_id: int  # -1 where there is an error
    logprobs: dict[int, float] | None = None  # to report: of the most probable tokens and this one
    logprob: float | None = None  # of this one, where it is asked for or ranks several samples
    error: str | None = None  # why no token could be sampled


@dataclass(eq=False)
class Sequence:
    """One sample of one request. Knows no arrays and no model.

    Whoever makes a sequence fills the first group of fields, which never change. All others change by the methods of
    this class alone, but for the two that are marked.
    on_chunk is called with each token's text during the step.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    index: int  # which of the request's samples
    eos_token_ids: frozenset[int]
    text: TextStream | None  # None where the checkpoint has no tokenizer
    deadline: float | None = None  # by time.perf_counter()
    window: Window | None = None  # None: it never has more tokens than there are positions
    on_chunk: Callable[[StreamChunk], None] | None = None
    soft_prompt: VirtualTokens | None = None  # what the ids below 0 stand for, which its prompt begins with
    prompt_logprobs: "PromptLogprobs | None" = None  # those of tokens that are given, where asked for
    guide: "Guide | None" = None  # where it stands in the grammar that its text has to follow
    on_end: Callable[[], None] | None = None  # called once, when the sample has ended by itself
    cache_salt: Hashable = None  # keys and values are shared with sequences of an equal one, and with no others

    # What was sampled, and what came of it.
    new_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    score: float | None = None  # by which a beam search ranked it
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # why it could not go on

    # Where it stands.
    slot: int | None = None  # of the KV cache, while running
    num_cached: int = 0  # positions in that slot
    num_reused: int = 0  # of those, the ones that others had computed
    num_dropped: int = 0  # tokens that have left the window
    scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    # Written by others.
    sampling_state: "SamplingState | None" = None  # the sampler's notes
    beams: "Beams | None" = None  # the search that chooses its tokens; by Beams

    def __post_init__(self):
        eos = frozenset() if self.params.ignore_eos else self.eos_token_ids
        self.end_token_ids = eos.union(self.params.stop_token_ids)
        if self.window is not None:
            self.num_dropped = self.window.num_dropped(len(self))

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.new_token_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.new_token_ids

    @property
    def context_token_ids(self) -> list[int]:
        """The tokens that the next one depends on: token i of them has position i."""
        return self.window.inside(self.token_ids, self.num_dropped) if self.num_dropped else self.token_ids

    @property
    def num_uncached(self) -> int:
        return len(self.prompt_token_ids) + len(self.new_token_ids) - self.num_dropped - self.num_cached

    @property
    def num_reusable(self) -> int:
        """Tokens that others may have computed: not the last, and none whose logits are wanted."""
        count = self.num_cached + self.num_uncached - 1
        return count if self.prompt_logprobs is None else min(count, self.prompt_logprobs.num_reusable)

    @property
    def has_to_slide(self) -> bool:
        return self.window is not None and self.window.num_dropped(len(self)) > self.num_dropped

    @property
    def may_end_by_its_text(self) -> bool:
        """Whether more than end_token_ids and the number of its tokens has to be looked at, to know that it has."""
        return bool(self.params.stop) or self.params.repetition_detection is not None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def next_token_ids(self, count: int) -> list[int]:
        """The `count` tokens that follow the cached ones."""
        if self.new_token_ids and self.num_uncached == 1:  # decode, the common case
            return self.new_token_ids[-1:]
        return self.context_token_ids[self.num_cached : self.num_cached + count]

    # The KV cache: where the sequence lies in it, and how far it is computed.

    def enter(self, slot: int, num_cached: int) -> None:
        """Run in `slot`, which holds the sequence's first tokens already."""
        self.scheduled_time = time.perf_counter()
        self.slot, self.num_cached, self.num_reused = slot, num_cached, num_cached

    def leave(self) -> None:
        self.slot = None

    def reuse(self, stop: int) -> None:
        """The positions up to `stop` have been copied from another slot."""
        self.num_reused += stop - self.num_cached
        self.num_cached = stop

    def advance(self, count: int) -> None:
        """The next `count` positions have been computed."""
        self.num_cached += count

    def slide(self) -> None:
        """Let the oldest tokens leave: the others get other positions, and are to be computed again."""
        self.num_dropped = self.window.num_dropped(len(self))
        self.num_cached = min(self.num_cached, self.window.num_fixed)

    # Its tokens, and its end.

    def take(self, token: SampledToken) -> None:
        """Append a sampled token, or fail. Sets the finish reason if it was the last one."""
        if token.error is not None:
            self.fail(token.error)
            return
        text = self._append(token)
        if self.on_chunk is not None:
            self._give(text, token)

    def extend(self, token_id: int) -> None:
        """Append a drafted token, which ends nothing."""
        self.new_token_ids.append(token_id)
        if self.guide is not None:
            self.guide.take(token_id)

    def become(self, token_ids: list[int], is_another: bool) -> None:
        """Go on as a beam with these new tokens, all cached but the last; `is_another`: not the one that it was."""
        if is_another:
            self.sampling_state = None  # it is about other tokens
        self.new_token_ids = token_ids
        if self.guide is not None:
            self.guide.follow(token_ids)
        self.num_cached = len(self) - 1
        self.first_token_time = self.first_token_time or time.perf_counter()

    def restart(self, score: float | None) -> None:
        """Forget all new tokens, to be given those of a finished hypothesis; None: there is none for this sequence."""
        self.new_token_ids, self.score = [], score
        if self.guide is not None:
            self.guide.restart()

    def rewind(self, num_cached: int) -> None:
        """Only the first num_cached positions of the slot are this sequence's."""
        self.num_cached = num_cached

    def expire(self) -> None:
        """End with what there is: the time of the request is over."""
        text = self._finish("length", "max_time")
        if self.on_chunk is not None:
            self._give(text, None)

    def fail(self, error: str) -> None:
        """End with an error that only this request's caller sees."""
        self.error = error

    def _append(self, token: SampledToken) -> str:
        """Note the token, and end if it is the last one. Returns the text that is certain now."""
        if self.first_token_time is None:
            self.first_token_time = time.perf_counter()
        self.new_token_ids.append(token.token_id)
        if self.guide is not None:
            self.guide.take(token.token_id)
        if token.logprobs is not None:
            self.logprobs.append(token.logprobs)
        if token.logprob is not None:
            self.cumulative_logprob += token.logprob
        text, end = self._push(token.token_id), self._end()
        return text if end is None else text + self._finish(*end)

    def _push(self, token_id: int) -> str:
        """The text that is certain with this token."""
        is_silent = token_id in self.end_token_ids and not self.params.include_stop_str_in_output
        if self.text is None or is_silent:
            return ""
        if self.on_chunk is not None or self.params.stop:
            return self.text.push(token_id)
        self.text.push_later(token_id)  # half of what a step takes in Python
        return ""

    def _end(self) -> tuple[Literal["stop", "length"], int | str | None] | None:
        """Why the last token is the last: the finish reason and the stop reason; None: it is not."""
        if self.params.stop and self.text.stop is not None:
            return "stop", self.text.stop
        if self.new_token_ids[-1] in self.end_token_ids:
            return "stop", self.new_token_ids[-1]
        if self.guide is not None and self.guide.is_over:
            return "stop", "grammar"
        if is_looping(self.new_token_ids, self.params):
            return "stop", "loop"
        return ("length", None) if len(self.new_token_ids) >= self.params.max_tokens else None

    def _finish(self, reason: Literal["stop", "length"], stop_reason: int | str | None) -> str:
        """End. Returns the text that was held back, which may still complete a stop string."""
        text = "" if self.text is None else self.text.finish()
        if self.params.stop and self.text.stop is not None:
            reason, stop_reason = "stop", self.text.stop
        self.stop_reason = stop_reason
        self.finished_time = time.perf_counter()
        self.finish_reason = reason
        return text

    def _give(self, text: str, token: SampledToken | None) -> None:
        """Call on_chunk with the text and the token, or that there is none."""
        token_id, logprobs = (None, None) if token is None else (token.token_id, copied(token.logprobs))
        prompt_logprobs = None
        if self.prompt_logprobs is not None and len(self.new_token_ids) == (token is not None):  # the first chunk
            reported = self.prompt_logprobs.reported
            prompt_logprobs = None if reported is None else [copied(entry) for entry in reported]
        try:
            self.on_chunk(
                StreamChunk(text, token_id, self.finish_reason, self.index, logprobs, prompt_logprobs, self.stop_reason)
            )
        except BaseException as error:  # it is a user's, and must not reach the step's other sequences
            self.fail(f"on_chunk raised {error!r}.")


def copied(logprobs: dict[int, float] | None) -> dict[int, float] | None:
    """For those who may change what they are given."""
    return None if logprobs is None else dict(logprobs)
