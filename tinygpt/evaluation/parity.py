"""How far one engine's logits and greedy tokens are from another's."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tinygpt.evaluation.golden import Golden

TOP = 20


@dataclass(frozen=True)
class Difference:
    """Of absolute values."""

    largest: float
    mean: float


@dataclass(frozen=True)
class Divergence:
    """Where two greedy runs part: the token `index` after the prompt, counted from 0.

    lead: by how much the expected token's logit led the next best one; a small lead may rightly be lost.
    """

    prompt: int
    index: int
    token_id: int
    expected: int
    lead: float


@dataclass(frozen=True)
class Parity:
    """The comparison of all prompts. Agreements are shares of all positions, from 0 to 1.

    top_1: the same most probable token; top_20: the share of the golden's TOP that is among ours, on average.
    by_position: from each prompt position on, up to the next one listed; by_layer: hidden states, embeddings first.
    """

    num_prompts: int
    num_positions: int
    num_greedy_tokens: int
    logits: Difference
    top_1: float
    top_20: float
    divergences: list[Divergence]
    by_position: dict[int, Difference]
    by_layer: list[Difference] | None

    def failures(self, tolerance: float) -> list[str]:
        """Why this is no parity, in sentences. A greedy token may be lost where two logits may have changed places."""
        failures = []
        if not self.logits.largest <= tolerance:  # NaN too
            failures.append(f"a logit differs by {self.logits.largest:.3g} and the tolerance is {tolerance:g}.")
        for parting in self.divergences:
            if not parting.lead <= 2 * tolerance:
                failures.append(
                    f"greedy token {parting.index} after prompt {parting.prompt} is {parting.token_id} instead of "
                    f"{parting.expected}, which led by {parting.lead:.3g}."
                )
        return failures


def compare(
    goldens: Sequence[Golden],
    logits: Sequence[np.ndarray],
    greedy_ids: Sequence[list[int]],
    hidden_states: Sequence[np.ndarray] | None = None,
) -> Parity:
    """Compare, for each golden, logits (T, V), greedy tokens and hidden states (L + 1, T, C), if these are wanted."""
    gaps = [np.abs(ours - golden.logits) for golden, ours in zip(goldens, logits, strict=True)]
    pairs = [(golden.logits, ours) for golden, ours in zip(goldens, logits, strict=True)]
    by_layer = None
    if hidden_states is not None:
        by_layer = _by_layer([golden.hidden_states for golden in goldens], hidden_states)
    return Parity(
        num_prompts=len(goldens),
        num_positions=sum(map(len, gaps)),
        num_greedy_tokens=sum(len(golden.greedy_ids) for golden in goldens),
        logits=_difference(gaps),
        top_1=_share([expected.argmax(-1) == ours.argmax(-1) for expected, ours in pairs]),
        top_20=_share([_top_agreement(expected, ours) for expected, ours in pairs]),
        divergences=_divergences(goldens, greedy_ids),
        by_position=_by_position(gaps),
        by_layer=by_layer,
    )


def _difference(gaps: Sequence[np.ndarray]) -> Difference:
    total = sum(gap.sum(dtype=np.float64) for gap in gaps)
    return Difference(float(np.max([gap.max() for gap in gaps])), float(total / sum(gap.size for gap in gaps)))


def _share(agreements: Sequence[np.ndarray]) -> float:
    return float(np.concatenate(agreements).mean())


def _top_agreement(expected: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """The share of the TOP most probable tokens that are also among our TOP, (T,)."""
    size = min(TOP, expected.shape[1])
    tops = [np.argsort(-logits, -1, kind="stable")[:, :size] for logits in (expected, ours)]  # (T, TOP) each
    return np.array([len(np.intersect1d(a, b)) / size for a, b in zip(*tops, strict=True)])


def _divergences(goldens: Sequence[Golden], greedy_ids: Sequence[list[int]]) -> list[Divergence]:
    found = []
    for prompt, (golden, ours) in enumerate(zip(goldens, greedy_ids, strict=True)):
        pairs = enumerate(zip(ours, golden.greedy_ids, strict=True))
        index = next((i for i, (token_id, expected) in pairs if token_id != expected), None)
        if index is not None:
            found.append(Divergence(prompt, index, ours[index], golden.greedy_ids[index], golden.greedy_leads[index]))
    return found


def _by_position(gaps: Sequence[np.ndarray]) -> dict[int, Difference]:
    """Positions 0, 1, 2 to 3, 4 to 7 and so on: an error that grows with the context shows, and the table is short."""
    longest, start, found = max(map(len, gaps)), 0, {}
    while start < longest:
        stop = max(1, 2 * start)
        found[start] = _difference([gap[start:stop] for gap in gaps if len(gap) > start])
        start = stop
    return found


def _by_layer(expected: Sequence[np.ndarray], ours: Sequence[np.ndarray]) -> list[Difference]:
    gaps = [np.abs(a - b) for a, b in zip(expected, ours, strict=True)]  # (L + 1, T, C) each
    return [_difference([gap[layer] for gap in gaps]) for layer in range(len(gaps[0]))]
