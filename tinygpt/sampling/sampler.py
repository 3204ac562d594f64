"""Sampler: from a step's logits to its tokens. Everything between the model and the next token meets here."""

from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np

from tinygpt.execution.model_runner import ModelRunner
from tinygpt.request.sequence import SampledToken, Sequence
from tinygpt.sampling.guided import compute_masks
from tinygpt.sampling.metadata import SamplingState, Warpers, gather_processors, gather_warpers

NOT_FINITE = (
    "the model's logits at position {} are not finite numbers: the checkpoint is damaged, or its activations "
    "overflow float32."
)
NOTHING_LEFT = (
    "the request's controls leave no token to choose at position {}: allow more in allowed_token_ids or in what guides "
    "the text, or forbid less with bad_words, suppress_tokens, min_tokens and no_repeat_ngram_size."
)
CANNOT_FOLLOW = "the grammar that guides the text cannot be followed at position {}: {}."
NOT_SCORES = (
    "the logits processor {} returned {} at position {}: it must return the scores of {} tokens, none of them NaN."
)


class Sampler:
    """Samples each sequence's next token from its row of logits.

    A row's result depends on that row and that sequence alone, to the last bit. Each sequence keeps the sampler's notes
    in its `sampling_state`, so its tokens may become more from one call to the next, and never change.
    """

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self._beside: ThreadPoolExecutor | None = None  # made when the first sequence is guided

    def compute_masks(self, sequences: Seq[Sequence]) -> None:
        """Begin with the masks of those that are guided, in a thread beside the step that computes their logits.

        A mask that is not there when it is needed is computed then, so nothing depends on that thread.
        """
        guides = [sequence.guide for sequence in sequences if sequence.guide is not None]
        if guides:
            self._beside = self._beside or ThreadPoolExecutor(1, "tinygpt-masks")
            with suppress(RuntimeError):  # no thread begins any more once the main one has ended
                self._beside.submit(compute_masks, guides)

    def close(self) -> None:
        """End that thread."""
        if self._beside is not None:
            self._beside.shutdown(wait=False)
            self._beside = None

    def sample(self, logits: Any, sequences: Seq[Sequence]) -> list[SampledToken]:
        """A token for each row of `logits` (R, V) float32, which may be written over."""
        states = self._updated_states(sequences)
        if all(state.is_plain for state in states):
            return self._take_greatest(logits, sequences)
        raw = {r: logits[r].copy() for r, s in enumerate(states) if s.changes_scores and s.wants_raw_logprobs}
        errors = self._process(logits, sequences, states)
        warpers, positions = gather_warpers(states), np.array([len(s) for s in sequences], np.uint64)  # (R,)
        _spare_top_k(warpers, sequences)
        token_ids = self.runner.sample(logits, warpers, *draws_of(sequences), positions).tolist()  # (R,)
        tokens = []
        for r, (token_id, error, state) in enumerate(zip(token_ids, errors, states, strict=True)):
            if error is None and token_id < 0:
                error = _why_none(logits[r], sequences[r], state)
            if error is not None:
                tokens.append(SampledToken(-1, error=error))
            elif not state.wants_logprobs:
                tokens.append(SampledToken(token_id))
            else:
                is_raw = state.wants_raw_logprobs
                scores = raw.get(r, logits[r]) if is_raw else self._warped(logits, warpers, r)  # (V,)
                tokens.append(self._with_logprobs(token_id, scores, state.params.logprobs))
        return tokens

    def is_drawn_alone(self, sequence: Sequence) -> bool:
        """Whether its tokens depend on its logits and its warpers alone, the same ones for each token."""
        (state,) = self._updated_states([sequence])
        return not (state.changes_scores or state.wants_logprobs or sequence.params.top_p_decay < 1)

    def process(self, scores: np.ndarray, sequences: Seq[Sequence]) -> list[str | None]:
        """Change each sequence's row of `scores` (R, V) float32 as it asks, in place; why its functions failed."""
        return self._process(scores, sequences, self._updated_states(sequences))

    def _updated_states(self, sequences: Seq[Sequence]) -> list[SamplingState]:
        for sequence in sequences:
            if sequence.sampling_state is None:
                sequence.sampling_state = SamplingState(sequence, self.runner.config.vocab_size)
            if not sequence.sampling_state.is_plain:
                sequence.sampling_state.update(sequence.new_token_ids)
        return [sequence.sampling_state for sequence in sequences]

    def _take_greatest(self, logits: Any, sequences: Seq[Sequence]) -> list[SampledToken]:
        """`sample` where no sequence asks for more: at batch 32, the way above takes longer than the kernel does."""
        count = len(sequences)
        greedy, no_draws = Warpers(*np.zeros((len(Warpers._fields), count))), np.zeros(count, np.uint64)
        token_ids = self.runner.sample(logits, greedy, no_draws, no_draws, no_draws).tolist()  # (R,)
        return [sampled(token_id, sequence) for token_id, sequence in zip(token_ids, sequences, strict=True)]

    def _process(self, scores: Any, sequences: Seq[Sequence], states: list[SamplingState]) -> list[str | None]:
        rows = [r for r, state in enumerate(states) if state.is_processed]
        if rows:
            self.runner.process_logits(scores, gather_processors(rows, [states[r] for r in rows]))
        errors = [None] * len(sequences)
        for r, (sequence, state) in enumerate(zip(sequences, states, strict=True)):
            for function in sequence.params.logits_processors:
                errors[r] = errors[r] or _call(function, scores, r, sequence, state)
        if any(sequence.guide for sequence in sequences):
            self._mask(scores, sequences, errors)
        return errors

    def _mask(self, scores: Any, sequences: Seq[Sequence], errors: list[str | None]) -> None:
        """Leave guided sequences the tokens that may come next, whatever their functions made of the others."""
        for r, sequence in enumerate(sequences):
            if sequence.guide is None:
                continue
            mask = sequence.guide.mask()
            if mask is not None:
                scores[r] += mask.added
            else:
                errors[r] = errors[r] or CANNOT_FOLLOW.format(len(sequence), sequence.guide.error)

    def _warped(self, logits: Any, warpers: Warpers, r: int) -> np.ndarray:
        """The scores (V,) whose probabilities row r was drawn by."""
        return self.runner.filter_logits(logits[r : r + 1], Warpers(*(column[r : r + 1] for column in warpers)))[0]

    def _with_logprobs(self, token_id: int, scores: np.ndarray, n: int | None) -> SampledToken:
        ids, values, value = self.runner.top_logprobs(scores, token_id, n or 0)
        if n is None:
            return SampledToken(token_id, logprob=float(value))
        best = zip(ids.tolist(), values.tolist(), strict=True)
        logprobs = {
            i: logprob for i, logprob in best if logprob > -np.inf
        }  # tokens that were removed have no logarithm
        return SampledToken(token_id, {**logprobs, token_id: float(value)}, float(value))


def sampled(token_id: int, sequence: Sequence) -> SampledToken:
    """What a backend chose by itself; a negative id says that the logits are not finite."""
    return SampledToken(token_id) if token_id >= 0 else SampledToken(-1, error=NOT_FINITE.format(len(sequence) - 1))


def draws_of(sequences: Seq[Sequence]) -> tuple[np.ndarray, np.ndarray]:
    """The seeds and sample indices (R,) that the sequences' tokens are drawn by."""
    return np.array([s.seed for s in sequences], np.uint64), np.array([s.index for s in sequences], np.uint64)


def _spare_top_k(warpers: Warpers, sequences: Seq[Sequence]) -> None:
    """Turn top-k off where it keeps all: fewer than k may come, and to find out that the k-th cannot takes long.

    With 50 257 tokens it is 0.3 ms a row, which is more than all else that guides a text.
    """
    for r, sequence in enumerate(sequences):
        mask = None if sequence.guide is None else sequence.guide.mask()
        if mask is not None and mask.count < warpers.top_k[r]:
            warpers.top_k[r] = 0


def _call(function: Any, all_scores: Any, r: int, sequence: Sequence, state: SamplingState) -> str | None:
    """Replace row r of the scores (R, V) by what a user's function makes of it; an error if it fails."""
    scores = all_scores[r]  # (V,)
    name = getattr(function, "__name__", type(function).__name__)
    try:
        returned = function(list(state.prompt_token_ids), list(sequence.new_token_ids), scores.copy())
        changed = np.asarray(returned, np.float32)
    except BaseException as error:  # whatever it is, it must not reach the step's other sequences
        return f"the logits processor {name} raised {error!r} at position {len(sequence)}."
    if changed.shape != scores.shape:
        return NOT_SCORES.format(name, f"an array of shape {changed.shape}", len(sequence), scores.size)
    if not (changed < np.inf).all() and (scores < np.inf).all():
        return NOT_SCORES.format(name, "NaN or +inf", len(sequence), scores.size)
    all_scores[r] = changed
    return None


def _why_none(scores: np.ndarray, sequence: Sequence, state: SamplingState) -> str:
    is_empty = state.changes_scores and not (scores > -np.inf).any() and not np.isnan(scores).any()
    return NOTHING_LEFT.format(len(sequence)) if is_empty else NOT_FINITE.format(len(sequence) - 1)
