"""Beam search: which beams continue with which token, and the best sequences that came to an end.

Source: transformers' `generate(num_beams=...)`, and for groups its custom generation method group-beam-search
(Vijayakumar et al., "Diverse Beam Search", 2016). Knows scores and token ids; no model and no cache.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class BeamRules:
    """What a search is asked to do; the fields are those of transformers' GenerationConfig.

    num_beams: beams that run at once, those of all groups together.
    max_tokens: new tokens at which every sequence ends.
    eos_token_ids: the tokens that end a sequence.
    length_penalty: above 0 favours long sequences, below 0 short ones.
    early_stopping: True ends the search as soon as num_beams sequences have ended; False, when the best running beam
        would not be among them if it ended now; "never", when it cannot come among them any more.
    num_beam_groups: groups of equal size, which choose one after another in each step.
    diversity_penalty: taken off a token's score for each beam of an earlier group that chose it in the same step.
    """

    num_beams: int
    max_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0

    @property
    def group_size(self) -> int:
        return self.num_beams // self.num_beam_groups

    @property
    def num_options(self) -> int:
        """How far down a group looks: if every EOS of every beam comes first, enough beams are left to go on."""
        return max(2, 1 + len(self.eos_token_ids)) * self.group_size

    @property
    def num_candidates(self) -> int:
        """How many candidates each beam has to name: the penalty may push down as many as there are beams."""
        return self.num_options + (self.num_beams if self.num_beam_groups > 1 else 0)

    def score(self, total: float, length: int) -> float:
        """total / length**length_penalty, in float32 as in transformers."""
        return float(np.float32(total) / np.float32(length**self.length_penalty))


@dataclass(frozen=True)
class Candidates:
    """The most probable next tokens of one beam, best first."""

    token_ids: np.ndarray  # (K,)
    scores: np.ndarray  # (K,) float32, log probabilities after the processors

    @classmethod
    def of(cls, scores: np.ndarray, count: int) -> "Candidates":
        """The `count` best of scores (V,), ties to the lowest id. Tokens of score -inf are none."""
        count = min(count, len(scores))
        worst = np.partition(scores, -count)[-count]
        token_ids = np.flatnonzero((scores >= worst) & (scores > -np.inf))
        token_ids = token_ids[np.argsort(-scores[token_ids], kind="stable")][:count]  # (K,)
        return cls(token_ids, scores[token_ids])


@dataclass(frozen=True)
class Beam:
    """The new tokens of a sequence, and the sum of their scores."""

    token_ids: list[int]
    total: float
    sources: list[int]  # for each token the index, among the beams of that step, of the one that it continued


@dataclass(frozen=True)
class Hypothesis:
    """A sequence that has ended: `score` is its total over length**length_penalty."""

    beam: Beam
    score: float
    finish_reason: Literal["stop", "length"]


class BeamSearch:
    """The search of one request, fed step by step.

    `beams` are those that run, at first one that has no token yet. For each step the caller finds the candidates of
    all of them and calls `advance`, which replaces them, until none is left. Of equal totals, the one of the lowest
    beam and then of the lowest token id comes first. Fewer beams than asked for run where fewer tokens are possible.

    is_stopped: whether a list of new token ids ends with its last one for another reason than EOS: a stop string, say.
    """

    def __init__(self, rules: BeamRules, is_stopped: Callable[[list[int]], bool] | None = None):
        self.rules = rules
        self.beams = [Beam([], 0.0, [])]
        self._groups = [_Group(rules, is_stopped) for _ in range(rules.num_beam_groups)]

    def advance(self, candidates: Seq[Candidates]) -> None:
        """Choose the next beams, where candidates[i] are those of beams[i]: group by group, each group's best first."""
        is_first = not self.beams[0].token_ids
        is_last = len(self.beams[0].token_ids) + 1 == self.rules.max_tokens
        chosen: Counter[int] = Counter()
        start = 0
        for group in self._groups:
            own = range(1) if is_first else range(start, start + len(group.beams))  # all start from the first beam
            start = own.stop
            options = [option for i in own for option in self._options(i, candidates[i], chosen)]
            best = sorted(options, key=lambda option: -option[0])[: self.rules.num_options]
            chosen.update(group.advance([self._continued(*option) for option in best], is_last))
        self.beams = [beam for group in self._groups for beam in group.beams]

    def end(self) -> None:
        """End all running beams as they are."""
        for group in self._groups:
            group.end()
        self.beams = []

    def best(self, n: int) -> list[Hypothesis]:
        """The n best sequences that have ended, or as many as there are."""
        return _best([hypothesis for group in self._groups for hypothesis in group.ended], n)

    def _options(self, source: int, candidates: Candidates, chosen: Counter[int]) -> list[tuple[float, int, int]]:
        """(total, source, token id) of one beam's candidates, less the penalty for what earlier groups chose."""
        token_ids, scores = candidates.token_ids.tolist(), candidates.scores
        if chosen:
            counts = np.array([chosen[token_id] for token_id in token_ids], np.float32)
            scores = scores - np.float32(self.rules.diversity_penalty) * counts
        totals = scores + np.float32(self.beams[source].total)
        options = [(total, source, token_id) for total, token_id in zip(totals.tolist(), token_ids, strict=True)]
        return sorted(options, key=lambda option: (-option[0], option[2]))

    def _continued(self, total: float, source: int, token_id: int) -> Beam:
        beam = self.beams[source]
        return Beam([*beam.token_ids, token_id], total, [*beam.sources, source])


class _Group:
    """Beams that compete with one another, and the best of them that have ended.

    Where there are several groups, transformers still has its older rules: the best continuation sets the bound even if
    it ends itself, and a group that is done at the last step takes no more sequences.
    """

    def __init__(self, rules: BeamRules, is_stopped: Callable[[list[int]], bool] | None):
        self.beams: list[Beam] = []
        self.ended: list[Hypothesis] = []
        self._rules = rules
        self._is_stopped = is_stopped or (lambda token_ids: False)
        self._is_done = False

    def advance(self, options: list[Beam], is_last: bool) -> list[int]:
        """Choose among the best continuations, in order. Returns what later groups are to avoid."""
        size, is_alone = self._rules.group_size, self._rules.num_beam_groups == 1
        if self._is_done:
            return [*self._rules.eos_token_ids[:1]] * size  # transformers pads an ended group with EOS
        ends = [self._is_end(beam.token_ids) for beam in options]
        running = [beam for beam, is_end in zip(options, ends, strict=True) if not is_end][:size]
        self._add([beam for beam, is_end in zip(options[:size], ends, strict=False) if is_end], "stop")
        bound = running if is_alone else options
        self._is_done = not bound or self._is_settled(bound[0])
        self.beams = running if not self._is_done or (is_last and is_alone) else []
        if is_last:
            self.end()
        return [beam.token_ids[-1] for beam in running]

    def end(self) -> None:
        self._add(self.beams, "length")
        self.beams = []

    def _is_end(self, token_ids: list[int]) -> bool:
        return token_ids[-1] in self._rules.eos_token_ids or self._is_stopped(token_ids)

    def _add(self, beams: list[Beam], finish_reason: Literal["stop", "length"]) -> None:
        new = [Hypothesis(b, self._rules.score(b.total, len(b.token_ids)), finish_reason) for b in beams]
        self.ended = _best(self.ended + new, self._rules.group_size)

    def _is_settled(self, bound: Beam) -> bool:
        """Whether enough sequences have ended, and running on would not improve on them."""
        rules = self._rules
        if len(self.ended) < rules.group_size:
            return False
        may_gain = rules.early_stopping == "never" and rules.length_penalty > 0
        length = rules.max_tokens if may_gain else len(bound.token_ids)
        return rules.early_stopping is True or rules.score(bound.total, length) <= self.ended[-1].score


def _best(hypotheses: list[Hypothesis], n: int) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)[:n]


@dataclass(frozen=True)
class Copy:
    """Positions start:stop of one slot of the KV cache, to be copied to another slot."""

    source_slot: int
    target_slot: int
    start: int
    stop: int


def plan_slots(sources: Seq[int], token_ids: dict[int, list[int]]) -> tuple[list[int], list[Copy]]:
    """Where each new beam runs, and what has to be copied there first.

    sources: for each new beam the slot of the one that it continues. token_ids: the tokens whose keys and values each
    slot of the request holds, empty for a slot not yet in use; at least as many slots as new beams.

    The first beam to continue a slot stays in it; the others take slots that nobody continues. So nothing is copied
    from a slot that is copied to, and the copies may be made in any order. What two slots have in common, bit for bit,
    is not copied.
    """
    free = [slot for slot in token_ids if slot not in sources]
    slots: list[int] = []
    copies = []
    for source in sources:
        if source not in slots:
            slots.append(source)
            continue
        target = free.pop(0)
        slots.append(target)
        start = _common_length(token_ids[source], token_ids[target])
        copies.append(Copy(source, target, start, len(token_ids[source])))
    return slots, copies


def _common_length(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
