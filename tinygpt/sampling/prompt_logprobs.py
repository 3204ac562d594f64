"""PromptLogprobs: what the model says of tokens that are given and not sampled, filled in as a prompt is read."""

import math
from dataclasses import dataclass, field

import numpy as np

from tinygpt.execution.model_runner import ModelRunner
from tinygpt.sampling.sampler import NOT_FINITE


@dataclass(eq=False)
class PromptLogprobs:
    """Log probabilities of `targets`, by the model's own probabilities.

    targets[i] is the token that comes after position first + i of the sequence, whose logits are wanted therefore, so
    that these positions cannot be reused from others.
    """

    first: int
    targets: list[int]
    num_best: int  # of the most probable tokens to report beside each target
    found: list[dict[int, float]] = field(default_factory=list)  # of each target so far: id -> log probability

    @property
    def reported(self) -> list[dict[int, float] | None]:
        """Of each token of the prompt so far: nothing comes before the first."""
        return [None, *self.found]

    @property
    def num_reusable(self) -> int | float:
        """How many positions may be taken over from others."""
        return math.inf if self.is_complete else self.first

    @property
    def is_complete(self) -> bool:
        return len(self.found) == len(self.targets)

    def num_logits(self, start: int, stop: int) -> int:
        """How many of the last positions from `start` to `stop` are to have their logits computed."""
        return 0 if self.is_complete else max(stop - max(start, self.first), 0)

    def max_count(self, start: int, num_logits: int) -> int | float:
        """How many positions from `start` on may be computed at once where num_logits may have their logits."""
        return math.inf if self.is_complete else max(self.first - start, 0) + num_logits

    def read(self, runner: ModelRunner, logits: np.ndarray) -> None:
        """Note the log probabilities of the next targets, from the logits (R, V) of the positions before them."""
        targets = self.targets[len(self.found) :][: len(logits)]
        rows = logits[: len(targets)]  # no target follows the last position of a prompt
        self.found += [self._read_row(runner, row, target) for row, target in zip(rows, targets, strict=True)]

    @property
    def logprobs(self) -> list[float]:
        """Of each target so far."""
        return [found[target] for target, found in zip(self.targets[: len(self.found)], self.found, strict=True)]

    @property
    def error(self) -> str | None:
        """Why the tokens have no probabilities, if they have none."""
        wrong = (i for i, logprob in enumerate(self.logprobs) if math.isnan(logprob))
        return next((NOT_FINITE.format(self.first + i) for i in wrong), None)

    def _read_row(self, runner: ModelRunner, logits: np.ndarray, target: int) -> dict[int, float]:
        if not np.isfinite(logits).all():
            return {target: math.nan}
        ids, values, value = runner.top_logprobs(logits, target, self.num_best)
        return {**dict(zip(ids.tolist(), values.tolist(), strict=True)), target: float(value)}
