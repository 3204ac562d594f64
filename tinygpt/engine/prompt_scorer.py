"""PromptScorer: the log probabilities of given tokens, such as a prompt's."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..kernels.backend import Backend
from ..outputs import ContinuationScore
from ..sampling_params import num_best
from ..text.tokenizer import Tokenizer
from .part import Part
from .sampling_state import not_finite
from .sequence import Sequence
from .step import Step


@dataclass(eq=False)
class PromptScorer(Part):
    """Log probabilities of given tokens, filled in during prefill: no position from `first` on is copied."""

    turn = 1  # the first chunk of a stream has them: tokens are chosen after
    first: int
    targets: list[int]  # targets[i] comes after position first + i of the sequence
    num_best: int  # most probable tokens to report with each target
    # Of each target so far: id -> log probability.
    entries: list[dict[int, float]] = field(default_factory=list)

    def of_sample(self, index: int) -> "PromptScorer | None":
        return self if index == 0 else None

    @property
    def max_prefix_tokens(self) -> int | float:
        return math.inf if self.is_complete else self.first

    @property
    def is_complete(self) -> bool:
        return len(self.entries) == len(self.targets)

    @property
    def logprobs(self) -> list[float]:
        return [entry[target] for target, entry in zip(self.targets, self.entries, strict=False)]

    def score(self, tokenizer: Tokenizer | None) -> ContinuationScore:
        best = [next(iter(entry)) for entry in self.entries]  # the most probable comes first
        tokens = None if tokenizer is None else tokenizer.pieces(self.targets)
        return ContinuationScore(self.targets, self.logprobs, self.targets == best, tokens)

    def error(self, sequence: Sequence) -> str | None:
        wrong = (i for i, logprob in enumerate(self.logprobs) if math.isnan(logprob))
        has_edits = bool(sequence.params.edits)
        return next((not_finite(self.first + i, has_edits) for i in wrong), None)

    def request_fields(self) -> dict[str, Any]:
        return {
            "prompt_logprobs": [None, *self.entries],  # the first token has none
            "prompt_cumulative_logprob": sum(self.logprobs) if self.is_complete else None,
        }

    def num_logits(self, start: int, stop: int) -> int:
        return 0 if self.is_complete else max(stop - max(start, self.first), 0)

    def max_count(self, start: int, room: int) -> int | float:
        return math.inf if self.is_complete else max(self.first - start, 0) + room

    def restart(self) -> None:
        if not self.is_complete:
            self.entries.clear()

    @classmethod
    def after(cls, step: Step, parts: "dict[int, PromptScorer]", logits: np.ndarray) -> None:
        for i, scorer in parts.items():
            chunk = step.chunks[i]
            if count := scorer.num_logits(chunk.start, chunk.stop):
                rows = logits[step.rows_of(i, count)]  # (count, V)
                scorer.read(step.runner.backend, rows)
                if chunk.reaches_end and not chunk.sequence.wants_token:
                    chunk.sequence.has_finite_logits = bool(np.isfinite(rows[-1]).all())

    def read(self, backend: Backend, rows: np.ndarray) -> None:
        """Read the next targets' log probabilities from rows of logits (n, V)."""
        for row, target in zip(rows, self.targets[len(self.entries) :], strict=False):
            if not np.isfinite(row).all():
                self.entries.append({target: math.nan})
                continue
            ids, values, value = backend.top_logprobs(row, target, num_best(self.num_best, len(row)))
            best = dict(zip(ids.tolist(), values.tolist(), strict=True))
            self.entries.append(best | {target: float(value)})
