"""Sequence: the bookkeeping of one sample: its tokens, how many of them are cached, when it ends."""

import time
from dataclasses import dataclass, field
from typing import Literal

from tinygpt.outputs import StreamChunk
from tinygpt.sampling_params import SamplingParams
from tinygpt.text_stream import TextStream


@dataclass(eq=False)
class Sequence:
    """One sample of one request. Knows no arrays and no model."""

    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    index: int  # which of the request's n samples
    eos_token_ids: frozenset[int]
    text: TextStream | None  # None where the checkpoint has no tokenizer
    new_token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_cached: int = 0  # positions in the KV cache
    row: int | None = None  # in the KV cache, while running
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # why it could not go on
    chunks: list[StreamChunk] | None = None  # not yet read by a stream; None where nobody streams
    first_token_time: float | None = None
    finished_time: float | None = None

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.new_token_ids)

    @property
    def num_uncached(self) -> int:
        return len(self) - self.num_cached

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def next_token_ids(self, count: int) -> list[int]:
        """The `count` tokens that follow the cached ones."""
        if self.new_token_ids and self.num_uncached == 1:  # decode, the common case
            return self.new_token_ids[-1:]
        return (self.prompt_token_ids + self.new_token_ids)[self.num_cached : self.num_cached + count]

    def append(self, token_id: int) -> None:
        """Take the next token. Sets the finish reason if it was the last."""
        if self.first_token_time is None:
            self.first_token_time = time.perf_counter()
        self.new_token_ids.append(token_id)
        ends = token_id in self.params.stop_token_ids or (not self.params.ignore_eos and token_id in self.eos_token_ids)
        is_full = len(self.new_token_ids) >= self.params.max_tokens
        text = stop = None
        if self.text is not None:
            text = "" if ends else self.text.push(token_id)
            if ends or is_full or self.text.stop is not None:
                text += self.text.finish()
            stop = self.text.stop
        reason = "stop" if ends or stop is not None else "length" if is_full else None
        if self.chunks is not None:
            self.chunks.append(StreamChunk(text or "", token_id, reason))
        if reason is not None:
            self.stop_reason = token_id if ends else stop
            self.finished_time = time.perf_counter()
            self.finish_reason = reason

    def fail(self, error: str) -> None:
        """End without a result: an error that whoever made the request is to see, and no neighbour of it."""
        self.error = error

    def add_logprobs(self, ids, values, chosen: float, token_id: int) -> None:
        """Report the most probable tokens (n,) of the next step and the chosen one's own log probability."""
        best = zip(ids.tolist(), values.tolist(), strict=True)
        self.logprobs.append({**dict(best), token_id: float(chosen)})
        self.cumulative_logprob += float(chosen)
