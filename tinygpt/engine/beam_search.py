"""Beam search: the algorithm, and Beams, which runs one request's search in the engine.

Source: transformers' `generate(num_beams=...)`, and for groups its custom generation method group-beam-search
(Vijayakumar et al., "Diverse Beam Search", 2016).
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from ..kernels import numbers
from ..sampling_params import SamplingParams, num_best
from ..text.stream import TextStream
from .part import Part
from .sampler import NOTHING_LEFT, Sampler
from .scheduler import CopyPositions
from .sequence import SampledToken, Sequence, common_prefix, is_looping
from .step import Step


@dataclass(frozen=True)
class Candidates:
    """The K most probable next tokens of one beam, best first, and the log probabilities to report; or an error."""

    token_ids: np.ndarray  # (K,)
    scores: np.ndarray  # (K,) float32, log probabilities after the processors
    best: dict[int, float] | None = None
    own: dict[int, float] | None = None  # of the candidates
    error: str | None = None

    @classmethod
    def of(cls, scores: np.ndarray, count: int) -> "Candidates":
        """Return the `count` best of scores (V,), ties to the lowest id, without scores of -inf."""
        count = min(count, len(scores))
        worst = np.partition(scores, -count)[-count]
        token_ids = np.flatnonzero((scores >= worst) & (scores > -np.inf))
        token_ids = token_ids[np.argsort(-scores[token_ids], kind="stable")][:count]  # (K,)
        return cls(token_ids, scores[token_ids])


@dataclass(frozen=True)
class Beam:
    token_ids: list[int]
    total: float
    # For each token, the index of the beam that it continued, among the beams of that step.
    sources: list[int]
    score: float | None = None  # of a beam that has ended: total / length**length_penalty


class BeamSearch:
    """The search of one request. The caller finds the candidates of `beams` and calls `advance` until none is left.

    Of equal totals, the lowest beam and then the lowest token id comes first.
    is_stopped: returns whether new token ids end for another reason than EOS, such as a stop string.
    """

    def __init__(
        self,
        params: SamplingParams,
        end_ids: Seq[int] = (),
        is_stopped: Callable[[list[int]], bool] = lambda token_ids: False,
    ):
        self.params = params
        self.beams = [Beam([], 0.0, [])]  # that run
        self._groups = [_Group(params, end_ids, is_stopped) for _ in range(params.num_beam_groups)]
        # The continuations that a group looks at: enough if each of end_ids comes first.
        self._num_options = max(2, 1 + len(end_ids)) * self._groups[0].size
        # Of each beam; the penalty may push down num_beams of them.
        self.num_candidates = self._num_options + (params.num_beams if params.num_beam_groups > 1 else 0)

    def advance(self, candidates: Seq[Candidates]) -> None:
        """Choose the next beams from candidates[i] of beams[i], group by group."""
        is_first = not self.beams[0].token_ids
        is_last = len(self.beams[0].token_ids) + 1 == self.params.max_tokens
        chosen: Counter[int] = Counter()
        start = 0
        for group in self._groups:
            # All start from the first beam.
            own = range(1) if is_first else range(start, start + len(group.beams))
            start = own.stop
            options = [option for i in own for option in enumerate(self._options(i, candidates[i], chosen))]
            best = sorted(options, key=self._order)[: self._num_options]
            chosen.update(group.advance([self._continued(*option) for _, option in best], is_last))
        self.beams = [beam for group in self._groups for beam in group.beams]

    def end(self) -> None:
        for group in self._groups:
            group.end()
        self.beams = []

    def best(self, n: int) -> list[Beam]:
        return _best([beam for group in self._groups for beam in group.ended], n)

    def _options(
        self, source: int, candidates: Candidates, chosen: Counter[int]
    ) -> list[tuple[float, int, int]]:
        token_ids = candidates.token_ids.tolist()
        scores = candidates.scores
        if chosen:
            counts = np.array([chosen[token_id] for token_id in token_ids], np.float32)
            scores = scores - np.float32(self.params.diversity_penalty) * counts
        totals = scores + np.float32(self.beams[source].total)
        options = [
            (total, source, token_id) for total, token_id in zip(totals.tolist(), token_ids, strict=True)
        ]
        return sorted(options, key=lambda option: (-option[0], option[2]))

    def _order(self, ranked: tuple[int, tuple[float, int, int]]) -> float:
        rank, (total, _, _) = ranked
        return -(total + self.params.beam_search_diversity_rate * (rank % self.params.num_beams))

    def _continued(self, total: float, source: int, token_id: int) -> Beam:
        beam = self.beams[source]
        return Beam([*beam.token_ids, token_id], total, [*beam.sources, source])


class _Group:
    """Beams that compete with one another, and the best of them that have ended.

    With several groups, as in transformers, the best continuation sets the bound even if it ends itself, and a group
    that is done at the last step takes no more sequences.
    """

    def __init__(self, params: SamplingParams, end_ids: Seq[int], is_stopped: Callable[[list[int]], bool]):
        self.size = params.num_beams // params.num_beam_groups
        self.beams: list[Beam] = []
        self.ended: list[Beam] = []
        self._params = params
        self._end_ids = end_ids
        self._is_stopped = is_stopped
        self._is_done = False

    def advance(self, options: list[Beam], is_last: bool) -> list[int]:
        """Choose among the best continuations, in order. Return the tokens that later groups are to avoid."""
        is_alone = self._params.num_beam_groups == 1
        if self._is_done:
            return [*self._end_ids[:1]] * self.size  # transformers pads an ended group with EOS
        is_stopped = self._is_stopped
        ends = [beam.token_ids[-1] in self._end_ids or is_stopped(beam.token_ids) for beam in options]
        running = [beam for beam, is_end in zip(options, ends, strict=True) if not is_end][: self.size]
        self._add([beam for beam, is_end in zip(options[: self.size], ends, strict=False) if is_end])
        bound = running if is_alone else options
        self._is_done = not bound or self._is_settled(bound[0])
        self.beams = running if not self._is_done or (is_last and is_alone) else []
        if is_last:
            self.end()
        return [beam.token_ids[-1] for beam in running]

    def end(self) -> None:
        self._add(self.beams)
        self.beams = []

    def _add(self, beams: list[Beam]) -> None:
        new = [replace(beam, score=self._score(beam.total, len(beam.token_ids))) for beam in beams]
        self.ended = _best(self.ended + new, self.size)

    def _is_settled(self, bound: Beam) -> bool:
        params = self._params
        if len(self.ended) < self.size:
            return False
        may_gain = params.early_stopping == "never" and params.length_penalty > 0
        length = params.max_tokens if may_gain else len(bound.token_ids)
        return params.early_stopping is True or self._score(bound.total, length) <= self.ended[-1].score

    def _score(self, total: float, length: int) -> float:
        """Return total / length**length_penalty, in float32 as transformers does."""
        return float(np.float32(total) / np.float32(length**self._params.length_penalty))


def _best(ended: list[Beam], n: int) -> list[Beam]:
    return sorted(ended, key=lambda beam: -beam.score)[:n]


def plan_slots(
    sources: Seq[int], token_ids: dict[int, list[int]]
) -> tuple[list[int], list[tuple[int, int, int, int]]]:
    """Return the slot of each new beam, and the copies (source_slot, target_slot, start, stop) to make before.

    sources: for each new beam, the slot of the beam that it continues. token_ids: those cached in each slot.
    The first beam to continue a slot stays in it; the others take slots that no beam continues. So no copy reads a slot
    that another one writes.
    """
    free = [slot for slot in token_ids if slot not in sources]
    slots, copies = [], []
    for source in sources:
        slots.append(free.pop(0) if source in slots else source)
        if slots[-1] != source:
            start = common_prefix(token_ids[source], token_ids[slots[-1]])
            copies.append((source, slots[-1], start, len(token_ids[source])))
    return slots, copies


class Beams(Part):
    """The sequences of one request, and the search whose beams they are.

    When all candidates of a step are there, `advance` gives each sequence the tokens of one of the new beams. In the
    end, sequence i has the tokens of the i-th best beam. new_text: makes a TextStream that finds stop strings.
    """

    can_pause = False

    def __init__(
        self,
        sequences: list[Sequence],
        eos_token_ids: Seq[int],
        new_text: Callable[[], TextStream | None],
    ):
        self.first = sequences[0]
        self._sequences = sequences
        params = self.first.params
        end_ids = dict.fromkeys((*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids))
        self._search = BeamSearch(params, [*end_ids], _stop_finder(self.first, new_text))
        self.num_candidates = self._search.num_candidates
        self._running = sequences[:1]  # the sequence of each running beam
        self._missing = set(sequences)  # sequences without candidates for this step
        self._candidates: dict[Sequence, Candidates] = {}
        self._steps: list[list[Candidates]] = []  # kept if log probabilities are wanted
        self.num_together = len(sequences)
        for sequence in sequences:
            sequence.parts = (*sequence.parts, self)
            sequence.is_counted = sequence is self.first

    def acts_on_next(self, sequence: Sequence) -> bool:
        return True

    @classmethod
    def before(cls, step: Step, parts: "dict[int, Beams]") -> None:
        step.chosen.update(i for i in parts if step.chunks[i].is_due)

    @classmethod
    def after(cls, step: Step, parts: "dict[int, Beams]", logits: Any) -> None:
        if due := [i for i in parts if step.chunks[i].is_due]:
            rows, sequences = step.logits_of(logits, due)
            searches = [parts[i] for i in due]
            predictions = predict(
                step.sampler, rows, sequences, [search.num_candidates for search in searches]
            )
            for search, sequence, prediction in zip(searches, sequences, predictions, strict=True):
                search.take(sequence, prediction)
        running = dict.fromkeys(parts.values())
        step.num_new += sum(search.has_begun for search in running)
        for search in running:
            search.advance(step.runner.copy_positions)

    @property
    def has_begun(self) -> bool:
        """Whether its beams have tokens."""
        return bool(self._search.beams and self._search.beams[0].token_ids)

    def take(self, sequence: Sequence, candidates: Candidates) -> None:
        self._candidates[sequence] = candidates
        sequence.has_finite_logits = candidates.error is None
        self._missing.discard(sequence)

    def advance(self, copy_positions: CopyPositions) -> None:
        step = [self._candidates[sequence] for sequence in self._running if sequence in self._candidates]
        error = next((candidates.error for candidates in step if candidates.error is not None), None)
        is_waiting = self._missing and error is None  # others wait in vain for one that fails
        if self.first.is_finished or is_waiting:
            return
        self._candidates.clear()
        if self.first.params.logprobs is not None:
            self._steps.append(step)
        if error is None:
            self._search.advance(step)
            if self._search.beams:
                self._place(self._search.beams, copy_positions)
            elif self._search.best(1):
                self._finish()
            else:
                error = NOTHING_LEFT.format(len(self._running[0]))
        if error is not None:
            for sequence in self._sequences:
                sequence.error = error

    def expire(self) -> None:
        if not self.first.is_finished:
            self._search.end()
            self._finish()

    def _place(self, beams: list[Beam], copy_positions: CopyPositions) -> None:
        sources = [self._running[beam.sources[-1]].slot for beam in beams]
        slots, copies = plan_slots(sources, {s.slot: s.token_ids for s in self._sequences})
        for copy in copies:
            copy_positions(*copy)
        of_slot = {sequence.slot: sequence for sequence in self._sequences}
        self._running = [of_slot[slot] for slot in slots]
        self._missing = set(self._running)
        for sequence, source, beam in zip(self._running, sources, beams, strict=True):
            sequence.continue_as(beam.token_ids, is_another=sequence.slot != source)

    def _finish(self) -> None:
        best = self._search.best(self.first.params.n)
        for sequence, beam in zip_longest(self._sequences, best):
            held = sequence.token_ids[: sequence.num_cached]
            sequence.clear_output(None if beam is None else beam.score)
            if beam is not None:
                self._give(sequence, beam)
            if not sequence.is_finished:
                sequence.end_early()
            # Of its slot, which others may reuse.
            sequence.num_cached = common_prefix(held, sequence.token_ids)

    def _give(self, sequence: Sequence, beam: Beam) -> None:
        for i, (token_id, source) in enumerate(zip(beam.token_ids, beam.sources, strict=True)):
            if not self._steps:
                sequence.append(SampledToken(token_id))
                continue
            candidates = self._steps[i][source]
            logprob = candidates.own[token_id]
            sequence.append(SampledToken(token_id, {**candidates.best, token_id: logprob}, logprob))


def predict(sampler: Sampler, logits: Any, sequences: Seq[Sequence], counts: Seq[int]) -> list[Candidates]:
    """Return as many candidates of each beam from its row of `logits` (R, V).

    As in transformers, the processors change log probabilities; without beams they change logits.
    """
    log_probs = numbers.log_softmax(logits)  # (R, V)
    scores = log_probs.copy()
    errors = sampler.process(scores, sequences)
    for row, sequence in zip(scores, sequences, strict=True):
        row[sequence.sampling_state.rules.num_tokens :] = -np.inf
    return [_candidates(*row) for row in zip(log_probs, scores, sequences, counts, errors, strict=True)]


def _candidates(
    log_probs: np.ndarray, scores: np.ndarray, sequence: Sequence, count: int, error: str | None
) -> Candidates:
    if error is None and not np.isfinite(log_probs.max()):  # max() is NaN if any is
        error = sequence.not_finite
    if error is not None:
        return Candidates(np.empty(0, np.int64), np.empty(0, np.float32), error=error)
    candidates = Candidates.of(scores, count)
    params = sequence.params
    if params.logprobs is None or not candidates.token_ids.size:
        return candidates
    reported = log_probs if params.logprobs_mode == "raw" else numbers.log_softmax(scores[None])[0]  # (V,)
    best = Candidates.of(reported, num_best(params.logprobs, len(reported)))
    return replace(
        candidates,
        best=dict(zip(best.token_ids.tolist(), best.scores.tolist(), strict=True)),
        own=dict(zip(candidates.token_ids.tolist(), reported[candidates.token_ids].tolist(), strict=True)),
    )


def _stop_finder(
    sequence: Sequence, new_text: Callable[[], TextStream | None]
) -> Callable[[list[int]], bool]:
    params = sequence.params
    guide = None if sequence.guide is None else sequence.guide.copy()

    def is_stopped(token_ids: list[int]) -> bool:
        if is_looping(token_ids, params):
            return True
        if params.stop:
            text = new_text()
            for token_id in token_ids:
                text.push(token_id)
            if text.stop is not None:
                return True
        if guide is not None:
            guide.follow(token_ids)
        return guide is not None and guide.is_over

    return is_stopped
