"""Sequence: the bookkeeping of one sample: its tokens, how many of them are cached, when it ends."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from tinygpt.errors import is_ctrl_c
from tinygpt.outputs import StreamChunk
from tinygpt.request.loop_detection import is_looping
from tinygpt.request.truncation import Window
from tinygpt.sampling_params import SamplingParams
from tinygpt.tokenizer.text_stream import TextStream


@dataclass(eq=False)
class Sequence:
    """One sample of one request. Knows no arrays and no model.

    on_chunk is called with each token's text during the step, on_end once when the sample has ended by itself.
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
    on_end: Callable[[], None] | None = None
    new_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_dropped: int = 0  # tokens that have left the window
    num_cached: int = 0  # positions in the KV cache
    num_reused: int = 0  # of those, the ones that others had computed
    slot: int | None = None  # of the KV cache, while running
    awaited: "Sequence | None" = None  # it computes what both prompts begin with...
    num_awaited: int = 0  # ...and this many tokens are that
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # why it could not go on
    controls: object | None = None  # what `choose` notes about it
    beams: object | None = None  # the search that chooses its tokens, where it is a beam
    score: float | None = None  # by which that search ranked it
    soft_prompt: object | None = None  # what the ids below 0 stand for, which its prompt begins with
    prompt_logprobs: object | None = None  # those of tokens that are given, where asked for
    scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    def __post_init__(self):
        eos = frozenset() if self.params.ignore_eos else self.eos_token_ids
        self._end_token_ids = eos.union(self.params.stop_token_ids)
        if self.window is not None:
            self.num_dropped = self.window.num_dropped(len(self))

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.new_token_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.new_token_ids

    @property
    def context_token_ids(self) -> list[int]:
        """The tokens that the next one is chosen by: token i of them has position i."""
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
    def is_finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def next_token_ids(self, count: int) -> list[int]:
        """The `count` tokens that follow the cached ones."""
        if self.new_token_ids and self.num_uncached == 1:  # decode, the common case
            return self.new_token_ids[-1:]
        return self.context_token_ids[self.num_cached : self.num_cached + count]

    def slide(self) -> None:
        """Let the oldest tokens leave: the others get other positions, and are to be computed again."""
        self.num_dropped = self.window.num_dropped(len(self))
        self.num_cached = min(self.num_cached, self.window.num_fixed)

    def append(self, token_id: int, logprobs: dict[int, float] | None = None, logprob: float | None = None) -> None:
        """Take the next token, the logprobs to report for it and its own. Sets the finish reason if it was the last."""
        try:
            chunk = self._append(token_id, logprobs, logprob)
        except BaseException:  # Ctrl-C: who comes by it may not be who waits for this sequence, and it is half done
            self.fail("it was interrupted while it was given a token.")
            raise
        if self.on_chunk is not None:
            self._give(chunk)

    def expire(self) -> None:
        """End with what there is: the time of the request is over."""
        chunk = self._finish(None, "length", "max_time", "")
        if self.on_chunk is not None:
            self._give(chunk)

    def fail(self, error: str) -> None:
        """End without a result: an error that whoever made the request is to see, and no neighbour of it."""
        self.error = error

    def _append(self, token_id: int, logprobs: dict[int, float] | None, logprob: float | None) -> StreamChunk | None:
        if self.first_token_time is None:
            self.first_token_time = time.perf_counter()
        self.new_token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if logprob is not None:
            self.cumulative_logprob += logprob
        ends, text = token_id in self._end_token_ids, ""
        if self.text is not None and not ends:
            if self.on_chunk is not None or self.params.stop:
                text = self.text.push(token_id)
            else:  # half of what a step takes in Python
                self.text.push_later(token_id)
        if ends:
            return self._finish(token_id, "stop", token_id, text)
        if self.params.stop and self.text.stop is not None:
            return self._finish(token_id, "stop", self.text.stop, text)
        if is_looping(self.new_token_ids, self.params):
            return self._finish(token_id, "stop", "loop", text)
        if len(self.new_token_ids) >= self.params.max_tokens:
            return self._finish(token_id, "length", None, text)
        return None if self.on_chunk is None else StreamChunk(text, token_id)

    def _finish(self, token_id: int | None, reason: str, stop_reason: int | str | None, text: str) -> StreamChunk:
        """End after `text`; what was held back may still complete a stop string."""
        if self.text is not None:
            text += self.text.finish()
            if reason == "length" and self.text.stop is not None:
                reason, stop_reason = "stop", self.text.stop
        self.stop_reason = stop_reason
        self.finished_time = time.perf_counter()
        self.finish_reason = reason
        return StreamChunk(text, token_id, reason)

    def _give(self, chunk: StreamChunk) -> None:
        try:
            self.on_chunk(chunk)
        except BaseException as error:  # it is a user's, and must not reach the step's other sequences
            if is_ctrl_c(error):
                raise
            self.fail(f"on_chunk raised {error!r}.")
