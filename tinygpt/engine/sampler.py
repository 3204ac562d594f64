"""Sampler: from a step's logits to its tokens, and the log probabilities of given tokens."""

from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..errors import FailedRequestError
from ..kernels.backend import Backend
from ..kernels.numbers import Processors, Ragged, Warpers
from ..kernels.reference import sampling
from ..sampling_params import LogitsProcessor, num_best
from .sampling_state import Filter, SamplingState
from .sequence import SampledToken, Sequence

NOTHING_LEFT = (
    "the request's controls leave no token to choose at position {}: allow more in allowed_token_ids or in what guides "
    "the text, or forbid less with bad_words, suppress_tokens, min_tokens and no_repeat_ngram_size."
)
NO_TOKENS = (
    " Ids from {} on are of no token: to be chosen, one must be named in logit_bias or allowed_token_ids."
)


def gather_processors(rows: Seq[int], states: Seq[SamplingState]) -> Processors:
    repetition, frequency, presence = np.array([s.penalties for s in states], np.float32).T.copy()
    return Processors(
        rows=np.array(rows, np.int64),
        token_ids=Ragged.of([s.token_ids for s in states]),
        num_prompt_tokens=np.array([s.num_prompt_tokens for s in states], np.int64),
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        bias_ids=Ragged.of([s.rules.bias_ids for s in states]),
        biases=Ragged.of([s.rules.biases for s in states]),
    )


def gather_warpers(states: Seq[SamplingState]) -> Warpers:
    columns = Warpers(
        temperature=[s.params.temperature for s in states],
        top_k=[s.params.top_k for s in states],
        top_p=[s.top_p for s in states],
        min_p=[s.params.min_p for s in states],
        num_tokens=[s.rules.num_tokens for s in states],
    )
    return Warpers(*np.array(columns, np.float64))


@dataclass(frozen=True)
class Draws:
    """How the tokens of R rows are drawn."""

    sequences: Seq[Sequence]
    warpers: Warpers
    filters: list[list[Filter]]  # all of a row's, if the backend lacks one of them; else none

    @classmethod
    def of(cls, sequences: Seq[Sequence]) -> "Draws":
        states = [sequence.sampling_state for sequence in sequences]
        warpers = gather_warpers(states)
        _spare_top_k(warpers, sequences)
        rows = zip(states, sequences, strict=True)
        return cls(sequences, warpers, [state.filters(s.index, len(s)) for state, s in rows])

    def num_tokens(self, r: int) -> int:
        return int(self.warpers.num_tokens[r])


class Sampler:
    """Samples each sequence's next token from its row of logits, independent of other rows to the last bit."""

    def __init__(self, backend: Backend):
        self.backend = backend
        self._mask_thread: ThreadPoolExecutor | None = None  # started with the first guided sequence

    def compute_masks(self, sequences: Seq[Sequence]) -> None:
        """Start to compute masks, in parallel to the step that computes the logits."""
        guides = [sequence.guide for sequence in sequences if sequence.guide is not None]
        if guides:
            self._mask_thread = self._mask_thread or ThreadPoolExecutor(1, "tinygpt-masks")
            with suppress(RuntimeError):  # no thread starts after the main one has ended
                self._mask_thread.submit(lambda: [guide.mask() for guide in guides])

    def close(self) -> None:
        if self._mask_thread is not None:
            self._mask_thread.shutdown(wait=False)

    def sample(self, logits: Any, sequences: Seq[Sequence]) -> list[SampledToken]:
        """Return a token for each row of `logits` (R, V) float32, which may be overwritten."""
        states = self._updated_states(sequences)
        if all(state.is_plain for state in states):
            return self._take_greatest(logits, sequences)
        raw = {r: logits[r].copy() for r, s in enumerate(states) if s.changes_scores and s.wants_raw_logprobs}
        errors = self.process(logits, sequences)
        draws = Draws.of(sequences)
        tokens = []
        for r, token_id in enumerate(self._draw(logits, draws)):
            error = errors[r]
            if error is None and token_id < 0:
                error = _why_none(logits[r][: draws.num_tokens(r)], sequences[r])
            if error is not None:
                tokens.append(SampledToken(-1, error=error))
            else:
                tokens.append(self._describe(token_id, logits, r, draws, raw))
        return tokens

    def is_drawn_alone(self, sequence: Sequence) -> bool:
        (state,) = self._updated_states([sequence])
        params = sequence.params
        varies = params.top_p_decay < 1 or params.xtc_probability > 0
        return not (
            state.changes_scores
            or state.wants_logprobs
            or varies
            or state.filters(sequence.index, len(sequence))
        )

    def drawn_by(self, sequences: Seq[Sequence]) -> Warpers | None:
        """Return what the rows are drawn by; None if one's logits are wanted for more."""
        if not all(self.is_drawn_alone(sequence) for sequence in sequences):
            return None
        return gather_warpers([sequence.sampling_state for sequence in sequences])

    def process(self, scores: np.ndarray, sequences: Seq[Sequence]) -> list[str | None]:
        """Apply each sequence's processors to its row of `scores` (R, V) float32, in place. Return errors."""
        states = self._updated_states(sequences)
        rows = [r for r, state in enumerate(states) if state.is_processed]
        if rows:
            self.backend.process_logits(scores, gather_processors(rows, [states[r] for r in rows]))
        return [_call_functions(scores, r, *row) for r, row in enumerate(zip(states, sequences, strict=True))]

    def _updated_states(self, sequences: Seq[Sequence]) -> list[SamplingState]:
        for sequence in sequences:
            if sequence.sampling_state is None:
                sequence.sampling_state = SamplingState(sequence.sample, bool(sequence.guide))
            if not sequence.sampling_state.is_plain:
                sequence.sampling_state.update(sequence.new_token_ids)
        return [sequence.sampling_state for sequence in sequences]

    def _draw(self, logits: Any, draws: Draws) -> list[int]:
        warpers = draws.warpers
        positions = np.array([len(s) for s in draws.sequences], np.uint64)  # (R,)
        keys = *draws_of(draws.sequences), positions
        own = [r for r, filters in enumerate(draws.filters) if filters]  # rows that the backend cannot draw
        temperature = warpers.temperature.copy()
        temperature[own] = 0
        plain = warpers._replace(temperature=temperature)
        token_ids = self.backend.sample(logits, plain, *keys).tolist()  # (R,)
        for r in own:
            keep = partial(sampling.filtered, filters=draws.filters[r])
            scores = logits[r][: draws.num_tokens(r)]
            key = (column[r] for column in keys)
            token_ids[r] = sampling.sample_row(scores, warpers.temperature[r], keep, *key)
        return token_ids

    def _take_greatest(self, logits: Any, sequences: Seq[Sequence]) -> list[SampledToken]:
        """Sample plain sequences: at batch 32, `sample` takes longer than the kernel."""
        count = len(sequences)
        num_tokens = np.array([s.sampling_state.rules.num_tokens for s in sequences], np.float64)
        greedy = Warpers(*np.zeros((len(Warpers._fields) - 1, count)), num_tokens)
        no_draws = np.zeros(count, np.uint64)
        token_ids = self.backend.sample(logits, greedy, no_draws, no_draws, no_draws).tolist()  # (R,)
        return [sampled(token_id, sequence) for token_id, sequence in zip(token_ids, sequences, strict=True)]

    def _describe(
        self, token_id: int, logits: Any, r: int, draws: Draws, raw: dict[int, np.ndarray]
    ) -> SampledToken:
        """raw: rows of the model's own logits, if they have been changed."""
        state = draws.sequences[r].sampling_state
        if not state.wants_logprobs:
            return SampledToken(token_id)
        if state.wants_raw_logprobs:
            return self._with_logprobs(token_id, raw[r] if r in raw else logits[r], state.params.logprobs)
        return self._with_logprobs(token_id, self._filtered(logits, r, draws), state.params.logprobs)

    def _filtered(self, logits: Any, r: int, draws: Draws) -> np.ndarray:
        if filters := draws.filters[r]:
            keep = partial(sampling.filtered, filters=filters)
            return sampling.kept_scores(logits[r], draws.num_tokens(r), keep)
        own = Warpers(*(column[r : r + 1] for column in draws.warpers))
        return self.backend.filter_logits(logits[r : r + 1], own)[0]

    def _with_logprobs(self, token_id: int, scores: np.ndarray, n: int | None) -> SampledToken:
        ids, values, value = self.backend.top_logprobs(scores, token_id, num_best(n or 0, len(scores)))
        if n is None:
            return SampledToken(token_id, logprob=float(value))
        best = zip(ids.tolist(), values.tolist(), strict=True)
        logprobs = {i: logprob for i, logprob in best if logprob > -np.inf}  # without removed tokens
        return SampledToken(token_id, {**logprobs, token_id: float(value)}, float(value))


def sampled(token_id: int, sequence: Sequence) -> SampledToken:
    """Return a backend's own choice; a negative id: the logits are not finite."""
    return SampledToken(token_id) if token_id >= 0 else SampledToken(-1, error=sequence.not_finite)


def draws_of(sequences: Seq[Sequence]) -> tuple[np.ndarray, np.ndarray]:
    """Return seeds and sample indices (R,), which with the position key each draw."""
    seeds = [sequence.sample.seed for sequence in sequences]
    return np.array(seeds, np.uint64), np.array([sequence.index for sequence in sequences], np.uint64)


def _spare_top_k(warpers: Warpers, sequences: Seq[Sequence]) -> None:
    """Turn top-k off if fewer than k tokens may come: with 50 257 tokens it takes 0.3 ms a row."""
    for r, sequence in enumerate(sequences):
        mask = None if sequence.guide is None else sequence.guide.mask()
        if mask is not None and mask.count < warpers.top_k[r]:
            warpers.top_k[r] = 0


def _call_functions(all_scores: Any, r: int, state: SamplingState, sequence: Sequence) -> str | None:
    """Change row r of scores (R, V). Return an error if a function fails."""
    if not state.calls_functions:
        return None
    scores = all_scores[r]  # (V,), which a GPU copies
    scores[state.rules.num_tokens :] = -np.inf
    texts = state.prompt_token_ids, sequence.new_token_ids
    try:
        for function in state.rules.processors:
            scores = function(*texts, scores)
        for function in state.params.logits_processors:
            scores = _checked(function, *texts, scores, sequence)
    except FailedRequestError as error:
        return str(error)
    if sequence.guide is not None:  # last: its mask holds whatever the functions return
        mask = sequence.guide.mask()
        if mask is None:
            reason = f"cannot be followed at position {len(sequence)}: {sequence.guide.error}."
            return f"the grammar that guides the text {reason}"
        scores += mask.added
    all_scores[r] = scores
    return None


def _checked(
    function: LogitsProcessor, prompt: list[int], new: list[int], scores: np.ndarray, sequence: Sequence
) -> np.ndarray:
    """Return the scores (V,) that a user's function makes of others. Raise FailedRequestError."""
    if np.isnan(scores).any() and not (scores > -np.inf).any():  # or the function could hide it
        raise FailedRequestError(sequence.not_finite)
    name = f"the logits processor {getattr(function, '__name__', type(function).__name__)}"
    try:
        changed = np.array(function(list(prompt), list(new), scores.copy()), np.float32)
    except BaseException as error:  # it must not reach the step's other sequences
        raise FailedRequestError(f"{name} raised {error!r} at position {len(sequence)}.") from None
    wrong = f"an array of shape {changed.shape}" if changed.shape != scores.shape else None
    if wrong is None and not (changed < np.inf).all() and (scores < np.inf).all():
        wrong = "NaN or +inf"
    if wrong is not None:
        wanted = f"it must return the scores of {scores.size} tokens, none of them NaN."
        raise FailedRequestError(f"{name} returned {wrong} at position {len(sequence)}: {wanted}")
    return changed


def _why_none(scores: np.ndarray, sequence: Sequence) -> str:
    state = sequence.sampling_state
    is_empty = state.changes_scores and not (scores > -np.inf).any() and not np.isnan(scores).any()
    if not is_empty:
        return sequence.not_finite
    unwritten = state.rules.unwritten
    return NOTHING_LEFT.format(len(sequence)) + NO_TOKENS.format(unwritten.start) * bool(unwritten)
