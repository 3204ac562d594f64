"""Beams: a beam search in the engine: its sequences run like all others, and take their next tokens together."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygpt.engine.kv_slots import common_prefix
from tinygpt.engine.prefix_sharing import CopyPositions
from tinygpt.request.loop_detection import is_looping
from tinygpt.request.sequence import SampledToken, Sequence
from tinygpt.sampling.beam_search import Beam, BeamRules, BeamSearch, Candidates, Hypothesis, plan_slots
from tinygpt.sampling.sampler import NOT_FINITE, NOTHING_LEFT, Sampler
from tinygpt.sampling_params import SamplingParams, num_best
from tinygpt.tokenizer.text_stream import TextStream


@dataclass(frozen=True)
class Prediction:
    """What the model says comes after a beam; with the log probabilities to report, where they are asked for."""

    candidates: Candidates | None
    best: dict[int, float] | None = None
    of_candidates: dict[int, float] | None = None
    error: str | None = None  # why nothing can be said


class Beams:
    """The sequences of one request, and the search whose beams they are.

    They run like any others until their next tokens are due. When all have come so far, `advance` gives each of them
    the tokens of one of the new beams. In the end, sequence i has those of the i-th best hypothesis.

    new_text: makes the TextStream that looks for stop strings; None where there are none.
    """

    def __init__(self, sequences: list[Sequence], rules: BeamRules, new_text: Callable[[], TextStream] | None):
        self.rules = rules
        self._sequences = sequences
        self._search = BeamSearch(rules, _stop_finder(sequences[0], new_text))
        self._running = sequences[:1]  # the sequence of each running beam
        self._missing = set(sequences)  # those whose predictions have not come yet
        self._predictions: dict[Sequence, Prediction] = {}
        self._steps: list[list[Prediction]] = []  # kept where log probabilities are asked for
        for sequence in sequences:
            sequence.beams = self

    @property
    def first(self) -> Sequence:
        """The one that the search begins with. The others read the same prompt."""
        return self._sequences[0]

    def take(self, sequence: Sequence, prediction: Prediction) -> None:
        """Note what comes after one of the sequences."""
        self._predictions[sequence] = prediction
        self._missing.discard(sequence)

    def advance(self, copy_positions: CopyPositions) -> None:
        """If all predictions have come, choose the next tokens of all sequences, or end them."""
        if self._missing or self._sequences[0].is_finished:
            return
        step = [self._predictions.pop(sequence) for sequence in self._running]
        self._predictions.clear()
        if self._sequences[0].params.logprobs is not None:
            self._steps.append(step)
        if errors := [prediction.error for prediction in step if prediction.error is not None]:
            self._fail(errors[0])
            return
        self._search.advance([prediction.candidates for prediction in step])
        if self._search.beams:
            self._place(self._search.beams, copy_positions)
        elif self._search.best(1):
            self._finish()
        else:
            self._fail(NOTHING_LEFT.format(len(self._running[0])))

    def expire(self) -> None:
        """End with what there is: the time of the request is over."""
        if not self._sequences[0].is_finished:
            self._search.end()
            self._finish()

    def _fail(self, error: str) -> None:
        for sequence in self._sequences:
            sequence.fail(error)

    def _place(self, beams: list[Beam], copy_positions: CopyPositions) -> None:
        """Give each new beam a sequence whose slot holds all of its tokens but the last."""
        sources = [self._running[beam.sources[-1]].slot for beam in beams]
        slots, copies = plan_slots(sources, {s.slot: s.token_ids for s in self._sequences})
        for copy in copies:
            copy_positions(copy.source_slot, copy.target_slot, copy.start, copy.stop)
        of_slot = {sequence.slot: sequence for sequence in self._sequences}
        self._running = [of_slot[slot] for slot in slots]
        self._missing = set(self._running)
        for sequence, source, beam in zip(self._running, sources, beams, strict=True):
            sequence.become(beam.token_ids, is_another=sequence.slot != source)

    def _finish(self) -> None:
        hypotheses = self._search.best(self._sequences[0].params.n)
        for i, sequence in enumerate(self._sequences):
            held = sequence.token_ids[: sequence.num_cached]
            sequence.restart(hypotheses[i].score if i < len(hypotheses) else None)
            if i < len(hypotheses):
                self._give(sequence, hypotheses[i])
            if not sequence.is_finished:
                sequence.expire()
            sequence.rewind(common_prefix(held, sequence.token_ids))  # of its slot, which others may use again

    def _give(self, sequence: Sequence, hypothesis: Hypothesis) -> None:
        for i, (token_id, source) in enumerate(zip(hypothesis.beam.token_ids, hypothesis.beam.sources, strict=True)):
            if not self._steps:
                sequence.take(SampledToken(token_id))
                continue
            prediction = self._steps[i][source]
            logprob = prediction.of_candidates[token_id]
            sequence.take(SampledToken(token_id, {**prediction.best, token_id: logprob}, logprob))


def beam_rules(params: SamplingParams, eos_token_ids: Seq[int]) -> BeamRules:
    """What a request asks of its search; eos_token_ids are those that end it unless it ignores them."""
    eos_token_ids = () if params.ignore_eos else eos_token_ids
    return BeamRules(
        params.num_beams,
        params.max_tokens,
        tuple(dict.fromkeys((*eos_token_ids, *params.stop_token_ids))),
        params.length_penalty,
        params.early_stopping,
        params.num_beam_groups,
        params.diversity_penalty,
    )


def predict(sampler: Sampler, logits: Any, sequences: Seq[Sequence]) -> list[Prediction]:
    """What comes after each of these beams, from its row of `logits` (R, V).

    As in transformers, the processors change log probabilities, where without beams they change logits.
    """
    log_probs = sampler.runner.log_softmax(logits)  # (R, V)
    scores = log_probs.copy()
    errors = sampler.process(scores, sequences)
    return [
        _prediction(sampler, *row) if error is None else Prediction(None, error=error)
        for error, *row in zip(errors, log_probs, scores, sequences, strict=True)
    ]


def _prediction(sampler: Sampler, log_probs: np.ndarray, scores: np.ndarray, sequence: Sequence) -> Prediction:
    if not np.isfinite(log_probs.max()):  # max() hands a NaN on
        return Prediction(None, error=NOT_FINITE.format(len(sequence) - 1))
    candidates, params = Candidates.of(scores, sequence.beams.rules.num_candidates), sequence.params
    if params.logprobs is None or not candidates.token_ids.size:
        return Prediction(candidates)
    reported = log_probs if params.logprobs_mode == "raw" else sampler.runner.log_softmax(scores[None])[0]  # (V,)
    best = Candidates.of(reported, num_best(params.logprobs, len(reported)))
    of_candidates = zip(candidates.token_ids.tolist(), reported[candidates.token_ids].tolist(), strict=True)
    return Prediction(
        candidates, dict(zip(best.token_ids.tolist(), best.scores.tolist(), strict=True)), dict(of_candidates)
    )


def _stop_finder(sequence: Sequence, new_text: Callable[[], TextStream] | None) -> Callable[[list[int]], bool] | None:
    """What tells whether new tokens end in a stop string, a loop or at a grammar's end, where the request has any."""
    params = sequence.params
    guide = None if sequence.guide is None else sequence.guide.copy()
    if not params.stop and params.repetition_detection is None and guide is None:
        return None

    def is_stopped(token_ids: list[int]) -> bool:
        if is_looping(token_ids, params) or (params.stop and _has_stop(new_text(), token_ids)):
            return True
        if guide is not None:
            guide.follow(token_ids)
        return guide is not None and guide.is_over

    return is_stopped


def _has_stop(text: TextStream, token_ids: list[int]) -> bool:
    for token_id in token_ids:
        text.push(token_id)
    return text.stop is not None
