"""Request: a prompt and the sequences that continue it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tinygpt.errors import FailedRequestError
from tinygpt.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tinygpt.request.prompts import Prompt
from tinygpt.request.sequence import Sequence, copied
from tinygpt.sampling_params import SamplingParams


@dataclass(frozen=True)
class Progress:
    """How far a request has come, which may never end by itself."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_new_tokens: int  # of all samples
    metrics: RequestMetrics  # as if it ended now


@dataclass(eq=False)
class Request:
    """A prompt and the sequences that continue it, in order of their index; one, where all samples are equal."""

    prompt: Prompt
    params: SamplingParams
    sequences: list[Sequence]
    arrival: float = field(default_factory=time.perf_counter)
    num_truncated: int = 0  # tokens of the prompt's beginning that are not read

    def when_finished(self, call: Callable[[], None]) -> None:
        """Have `call` called in the step that ends the last sequence, unless the request is removed before."""
        left = len(self.sequences)

        def end_one() -> None:
            nonlocal left
            left -= 1
            if not left:
                call()

        for sequence in self.sequences:
            sequence.on_end = end_one

    def output(self) -> RequestOutput:
        """Return the output of a finished request. Raise FailedRequestError if a sequence failed."""
        self.raise_error()
        wanted = self.sequences[0].prompt_logprobs
        return RequestOutput(
            prompt=self.prompt.text,
            prompt_token_ids=list(self.prompt.token_ids),
            outputs=[_completion(rank, s) for rank, s in enumerate(self._best())],
            metrics=self._metrics(),
            prompt_logprobs=None if wanted is None else wanted.reported,
            prompt_cumulative_logprob=sum(wanted.logprobs) if wanted is not None and wanted.is_complete else None,
            num_cached_tokens=self._num_cached_tokens(),
            num_truncated_tokens=self.num_truncated,
        )

    def progress(self) -> Progress:
        """Any thread may ask."""
        count = sum(len(s.new_token_ids) for s in self.sequences)
        return Progress(
            num_prompt_tokens=len(self.prompt.token_ids),
            num_cached_tokens=self._num_cached_tokens(),
            num_new_tokens=count * self.params.n if len(self.sequences) == 1 else count,
            metrics=self._metrics(),
        )

    def raise_error(self) -> None:
        """FailedRequestError if a sequence has failed."""
        wanted = self.sequences[0].prompt_logprobs
        for error in [s.error for s in self.sequences] + [wanted and wanted.error]:
            if error:
                raise FailedRequestError(error)

    def _num_cached_tokens(self) -> int:
        first = self.sequences[0]
        return max(first.num_reused - len(first.soft_prompt or ()), 0)

    def _best(self) -> list[Sequence]:
        """The n sequences to return: all of them, or those of best_of that are most probable per token.

        A beam search has found its sequences in order, and fewer than n where no more were possible. A single sequence
        stands for all samples.
        """
        if self.params.num_beams > 1:
            return [s for s in self.sequences if s.score is not None] or self.sequences[: self.params.n]
        if len(self.sequences) == 1:
            return self.sequences * self.params.n
        if len(self.sequences) == self.params.n:
            return self.sequences
        return sorted(self.sequences, key=_mean_logprob, reverse=True)[: self.params.n]  # stable: the lowest index

    def _metrics(self) -> RequestMetrics:
        scheduled = min((s.scheduled_time for s in self.sequences if s.scheduled_time is not None), default=None)
        first_token = min((s.first_token_time for s in self.sequences if s.first_token_time is not None), default=None)
        ends = [s.finished_time for s in self.sequences]
        finished = time.perf_counter() if None in ends else max(ends)
        return RequestMetrics(
            arrival=self.arrival,
            scheduled=scheduled,
            first_token=first_token,
            finished=finished,
            num_steps=max(len(s.new_token_ids) for s in self.sequences),
        )


def _mean_logprob(sequence: Sequence) -> float:
    """Per token, as OpenAI ranks samples; one without a token comes last."""
    count = len(sequence.new_token_ids)
    return sequence.cumulative_logprob / count if count else float("-inf")


def _completion(rank: int, sequence: Sequence) -> CompletionOutput:
    wants_logprobs = sequence.params.logprobs is not None
    return CompletionOutput(
        index=rank,
        text=None if sequence.text is None else sequence.text.text,
        token_ids=list(sequence.new_token_ids),
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        logprobs=[copied(entry) for entry in sequence.logprobs] if wants_logprobs else None,
        cumulative_logprob=sequence.cumulative_logprob if wants_logprobs else None,
        score=sequence.score,
        seed=sequence.seed,
    )
