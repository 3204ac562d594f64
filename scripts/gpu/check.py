"""Whether both sides compute the same: logits of one text, and 200 greedy tokens."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

CHECK_TOKENS, CHECK_PROMPT, GREEDY_TOKENS = 256, 32, 200


def check_ids(vocab_size: int) -> list[int]:
    return np.random.default_rng(99).integers(0, vocab_size, CHECK_TOKENS).tolist()


@dataclass(frozen=True)
class Evidence:
    """What one side says. logits: (CHECK_TOKENS, V), teacher-forced. tokens: GREEDY_TOKENS after CHECK_PROMPT of them.

    gaps: how far apart the best two logits were at each greedy token, where the side says so.
    """

    logits: np.ndarray
    tokens: np.ndarray
    gaps: np.ndarray | None = None

    def save(self, path: str) -> None:
        optional = {} if self.gaps is None else {"gaps": self.gaps}
        np.savez(path, logits=self.logits, tokens=self.tokens, **optional)

    @classmethod
    def load(cls, path: Path) -> "Evidence":
        with np.load(path) as kept:
            return cls(kept["logits"], kept["tokens"], kept.get("gaps"))


@dataclass(frozen=True)
class Agreement:
    """Ours beside transformers in float32. gap: of transformers' best two logits where the tokens part."""

    dtype: str
    largest_difference: float
    same_top_1: float
    same_tokens: int
    gap: float | None

    @classmethod
    def of(cls, dtype: str, ours: Evidence, theirs: Evidence) -> "Agreement":
        difference = np.abs(ours.logits - theirs.logits).max()  # NaN, if there is one, is the largest
        same_top_1 = np.mean(ours.logits.argmax(-1) == theirs.logits.argmax(-1))
        differing = np.flatnonzero(ours.tokens != theirs.tokens)
        num_same = int(differing[0]) if differing.size else len(theirs.tokens)
        gap = float(theirs.gaps[num_same]) if differing.size and theirs.gaps is not None else None
        return cls(dtype, float(difference), float(same_top_1), num_same, gap)

    @property
    def are_tokens_identical(self) -> bool:
        return self.same_tokens == GREEDY_TOKENS

    def __str__(self) -> str:
        tokens = f"greedy tokens identical over {GREEDY_TOKENS} steps"
        if not self.are_tokens_identical:
            apart = "" if self.gap is None else f", where transformers' best two logits are {self.gap:.2g} apart"
            tokens = f"greedy tokens differ after {self.same_tokens} of {GREEDY_TOKENS} steps{apart}"
        return (
            f"{self.dtype}: logits of {CHECK_TOKENS} tokens differ from transformers' float32 by at most "
            f"{self.largest_difference:.2g}, the same top-1 at {self.same_top_1:.1%} of positions; {tokens}"
        )
