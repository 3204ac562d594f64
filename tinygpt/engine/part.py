"""Part: a feature of a sequence, such as captures, prompt log probabilities, drafts or beams."""

import math
from typing import Any

import numpy as np


class Part:
    """What a feature asks of the steps of its sequence. These defaults ask for nothing.

    A step calls `before` and `after` once for each class of its sequences' parts: `before` in the order of `turn`, so
    that a look knows all drafts, `after` in reverse, so that all have read the logits when tokens are chosen.
    """

    turn: int = 0
    num_together: int = 1  # sequences that run at once or not at all
    can_pause: bool = True  # whether the sequence can be computed again, unseen
    max_prefix_tokens: int | float = math.inf  # that may be copied from other sequences, or remain for them

    def of_sample(self, index: int) -> "Part | None":
        """Return the part of a request's sample; None if the first sample's serves all."""
        return self

    def acts_on_next(self, sequence: Any) -> bool:
        """Return whether Python acts after the sequence's next token, so that backends take a single step."""
        return False

    def prefix_ids(self, token_ids: list[int]) -> list[int]:
        """Return the ids by which the prefix cache compares tokens."""
        return token_ids

    def first_layer(self, position: int) -> int:
        """Return the layer that a step from this position on begins with: the steps of others differ."""
        return 0

    def num_logits(self, start: int, stop: int) -> int:
        """Return how many of the last positions from `start` to `stop` need a row of logits for this part."""
        return 0

    def max_count(self, start: int, room: int) -> int | float:
        """Return how many tokens from `start` on fit in a step: of one first layer, with at most `room` logits."""
        return math.inf

    def error(self, sequence: Any) -> str | None:
        """Return why a finished sequence has no result, if so."""
        return None

    def request_fields(self) -> dict[str, Any]:
        """Return fields of the RequestOutput."""
        return {}

    def sample_fields(self, sequence: Any) -> dict[str, Any]:
        """Return fields of the CompletionOutput and of the last StreamChunk."""
        return {}

    def restart(self) -> None:
        """Forget results of a sequence that is computed again."""

    def expire(self) -> None:
        """End a part that chooses tokens, as the sequence's time is over."""

    @classmethod
    def before(cls, step: Any, parts: dict[int, Any]) -> None:
        """Change the Step before it runs: its drafts, its look, or the sequences whose tokens the parts choose.

        parts: by i, of step.chunks[i].
        """

    @classmethod
    def after(cls, step: Any, parts: dict[int, Any], logits: np.ndarray) -> None:
        """Read the step's logits (R, V), before the sampler may write over them."""
