"""Sampler: from a step's logits to its tokens, and the log probabilities of given tokens."""

import math
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from ..kernels.numbers import Warpers
from ..kernels.reference.sampling import uniform
from ..sampling_params import SamplingParams
from .model_runner import ModelRunner
from .sequence import Breakers, SampledToken, Sequence

NOT_FINITE = "the checkpoint is damaged, or its activations overflow float32"
NOTHING_LEFT = (
    "the request's controls leave no token to choose at position {}: allow more in allowed_token_ids or in what guides "
    "the text, or forbid less with bad_words, suppress_tokens, min_tokens and no_repeat_ngram_size."
)
XTC = 1  # the use of a number that decides whether tokens are excluded
TOP_P_RULES = {"hf": 0, "openai": 1, "fastertransformer": 2}


class Ragged(NamedTuple):
    """Arrays of different lengths, end to end."""

    values: np.ndarray
    bounds: np.ndarray  # (count + 1,) int64: array i is values[bounds[i]:bounds[i + 1]]

    @classmethod
    def of(cls, arrays: Seq[np.ndarray]) -> "Ragged":
        bounds = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([array.size for array in arrays], out=bounds[1:])
        return cls(np.concatenate(arrays), bounds)

    def part(self, i: int) -> np.ndarray:
        return self.values[self.bounds[i] : self.bounds[i + 1]]


class Dry(NamedTuple):
    """SamplingParams' fields of this name, with the breakers in token ids."""

    multiplier: float
    base: float
    allowed_length: int
    penalty_last_n: int
    breakers: Breakers


class Processors(NamedTuple):
    """Logits processors of P rows of logits."""

    rows: np.ndarray  # (P,) int64
    token_ids: Ragged  # int32, the prompt and the output of each row
    num_prompt_tokens: np.ndarray  # (P,) int64
    repetition_penalty: np.ndarray  # (P,) float32
    frequency_penalty: np.ndarray  # (P,) float32
    presence_penalty: np.ndarray  # (P,) float32
    no_repeat_ngram_size: np.ndarray  # (P,) int64, 0 is none
    dry: list[Dry | None]
    bias_ids: Ragged  # int32
    biases: Ragged  # float32, one for each of bias_ids
    allowed_ids: Ragged  # int32; empty: all may come
    forbidden_ids: Ragged  # int32


class TokenRules:
    """What params name by token ids. The samples of a request share it, and `Sampler` forgets it with the last."""

    def __init__(self, params: SamplingParams, eos_token_ids: frozenset[int], vocab_size: int):
        self.params = params  # alive, so that no others have its `id`
        self.bias_ids = _ids(token_id for token_id, _ in params.logit_bias)
        self.biases = np.array([bias for _, bias in params.logit_bias], np.float32)
        last: dict[tuple[int, ...], dict[int, None]] = {}
        for *beginning, token_id in params.bad_words_ids:
            if beginning or token_id not in eos_token_ids:
                last.setdefault(tuple(beginning), {})[token_id] = None
        self.last_ids = {
            beginning: _ids(ids) for beginning, ids in last.items()
        }  # of bad words, by all ids before it
        self.beginning_sizes = {*map(len, last)}
        self.allowed_ids = _ids(dict.fromkeys(params.allowed_token_ids or ()))
        self.suppressed_ids = _ids(dict.fromkeys(params.suppress_tokens))
        ends = eos_token_ids.union(params.stop_token_ids)  # even with ignore_eos, as in vLLM
        ends = _ids(token_id for token_id in ends if token_id < vocab_size) if params.min_tokens else _NO_IDS
        self.forbidden_at_first = np.concatenate((self.suppressed_ids, ends))  # until there are min_tokens
        self.is_any = bool(
            last or self.bias_ids.size or self.allowed_ids.size or self.forbidden_at_first.size
        )


class SamplingState:
    """The sampler's state of one sequence, which never gets shorter."""

    def __init__(self, sequence: Sequence, edits: TokenRules):
        params = sequence.params
        self.params = sequence.params
        self.edits = edits
        self.warpers = warpers_of(params)
        is_ft = params.presence_penalty_rule == "fastertransformer"
        presence = params.presence_penalty * (params.temperature or 1 if is_ft else 1)
        self.penalties = params.repetition_penalty, params.frequency_penalty, presence
        self.dry = None
        if params.dry_multiplier and params.dry_penalty_last_n:
            sizes = params.dry_allowed_length, params.dry_penalty_last_n
            self.dry = Dry(params.dry_multiplier, params.dry_base, *sizes, sequence.sample.dry_breakers)
        has_penalties = (
            self.penalties != (1.0, 0.0, 0.0) or params.no_repeat_ngram_size or self.dry is not None
        )
        self._uses_history = bool(has_penalties or any(edits.beginning_sizes))
        self.is_processed = self._uses_history or edits.is_any
        self.changes_scores = bool(self.is_processed or params.logits_processors or sequence.guide)
        self.wants_logprobs = params.logprobs is not None or (params.best_of or params.n) > params.n
        self.wants_raw_logprobs = self.wants_logprobs and params.logprobs_mode == "raw"
        self.is_plain = params.temperature == 0 and not self.changes_scores and not self.wants_logprobs
        # Rows of soft prompts have ids below 0, which never come again.
        self.prompt_token_ids = [token_id for token_id in sequence.prompt_token_ids if token_id >= 0]
        self.num_prompt_tokens = 0 if is_ft else len(self.prompt_token_ids)  # that no presence penalty counts
        self._history = array("i", self.prompt_token_ids if self._uses_history else ())
        self._num_new = 0

    def update(self, new_token_ids: list[int]) -> None:
        added = new_token_ids[self._num_new :]
        if self._uses_history:
            self._history.extend(added)
        if self.params.top_p_decay < 1:
            temperature, top_k, top_p, *others = self.warpers
            for token_id in added:
                is_reset = token_id in (self.params.top_p_reset_ids or ())
                top_p = (
                    self.params.top_p
                    if is_reset
                    else max(top_p * self.params.top_p_decay, self.params.top_p_min)
                )
            self.warpers = temperature, top_k, top_p, *others
        self._num_new += len(added)

    @property
    def token_ids(self) -> np.ndarray:
        return np.array(self._history, np.int32)

    @property
    def forbidden_ids(self) -> np.ndarray:
        """The suppressed tokens, and the last token of each forbidden word that the text ends with but for it."""
        edits, size = self.edits, len(self._history)
        ids = edits.forbidden_at_first if self._num_new < self.params.min_tokens else edits.suppressed_ids
        begun = [tuple(self._history[size - count :]) for count in edits.beginning_sizes if count <= size]
        found = [edits.last_ids[beginning] for beginning in begun if beginning in edits.last_ids]
        return np.concatenate((ids, *found)) if found else ids


def warpers_of(params: SamplingParams) -> tuple[float, ...]:
    given = {name: getattr(params, name) for name in Warpers._fields}
    changed = {
        "top_p_rule": TOP_P_RULES[params.top_p_rule],
        "xtc_threshold": Warpers._field_defaults["xtc_threshold"],
    }
    return tuple({**given, **changed}.values())


def gather_processors(rows: Seq[int], states: Seq[SamplingState]) -> Processors:
    repetition, frequency, presence = np.array([s.penalties for s in states], np.float32).T.copy()
    return Processors(
        rows=np.array(rows, np.int64),
        token_ids=Ragged.of([s.token_ids for s in states]),
        num_prompt_tokens=np.array([s.num_prompt_tokens for s in states], np.int64),
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        no_repeat_ngram_size=np.array([s.params.no_repeat_ngram_size for s in states], np.int64),
        dry=[s.dry for s in states],
        bias_ids=Ragged.of([s.edits.bias_ids for s in states]),
        biases=Ragged.of([s.edits.biases for s in states]),
        allowed_ids=Ragged.of([s.edits.allowed_ids for s in states]),
        forbidden_ids=Ragged.of([s.forbidden_ids for s in states]),
    )


def gather_warpers(states: Seq[SamplingState]) -> Warpers:
    return Warpers(
        *np.array([s.warpers for s in states], np.float64).reshape(-1, len(Warpers._fields)).T.copy()
    )


def _ids(token_ids: Iterable[int]) -> np.ndarray:
    return np.array(list(token_ids), np.int32)


_NO_IDS = _ids(())


class Sampler:
    """Samples each sequence's next token from its row of logits, independent of other rows to the last bit."""

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self._edits: WeakValueDictionary[tuple[int, frozenset[int]], TokenRules] = WeakValueDictionary()
        self._mask_thread: ThreadPoolExecutor | None = None  # started with the first guided sequence

    def compute_masks(self, sequences: Seq[Sequence]) -> None:
        """Start to compute the masks of guided sequences, in parallel to the step that computes their logits."""
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
        warpers = gather_warpers(states)
        positions = np.array([len(s) for s in sequences], np.uint64)  # (R,)
        _spare_top_k(warpers, sequences)
        _draw_exclusions(warpers, sequences)
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
                scores = (
                    raw.get(r, logits[r]) if state.wants_raw_logprobs else self._warped(logits, warpers, r)
                )  # (V,)
                tokens.append(self._with_logprobs(token_id, scores, state.params.logprobs))
        return tokens

    def is_drawn_alone(self, sequence: Sequence) -> bool:
        (state,) = self._updated_states([sequence])
        params = sequence.params
        changes = state.changes_scores or state.wants_logprobs
        return not (changes or params.top_p_decay < 1 or params.xtc_probability)

    def process(self, scores: np.ndarray, sequences: Seq[Sequence]) -> list[str | None]:
        """Apply each sequence's processors to its row of `scores` (R, V) float32, in place. Return errors."""
        states = self._updated_states(sequences)
        rows = [r for r, state in enumerate(states) if state.is_processed]
        if rows:
            self.runner.process_logits(scores, gather_processors(rows, [states[r] for r in rows]))
        errors = [None] * len(sequences)
        for r, (sequence, state) in enumerate(zip(sequences, states, strict=True)):
            for function in sequence.params.logits_processors:
                errors[r] = errors[r] or _call(function, scores, r, sequence, state)
            guide = sequence.guide  # last: its mask holds whatever the functions return
            if guide is not None and (mask := guide.mask()) is not None:
                scores[r] += mask.added
            elif guide is not None:
                reason = f"cannot be followed at position {len(sequence)}: {guide.error}."
                errors[r] = errors[r] or f"the grammar that guides the text {reason}"
        return errors

    def _updated_states(self, sequences: Seq[Sequence]) -> list[SamplingState]:
        for sequence in sequences:
            if sequence.sampling_state is None:
                sequence.sampling_state = SamplingState(sequence, self._edits_of(sequence))
            if not sequence.sampling_state.is_plain:
                sequence.sampling_state.update(sequence.new_token_ids)
        return [sequence.sampling_state for sequence in sequences]

    def _edits_of(self, sequence: Sequence) -> TokenRules:
        key = id(sequence.params), sequence.sample.eos_token_ids
        if (edits := self._edits.get(key)) is None:
            edits = self._edits[key] = TokenRules(
                sequence.params, sequence.sample.eos_token_ids, self.runner.config.vocab_size
            )
        return edits

    def _take_greatest(self, logits: Any, sequences: Seq[Sequence]) -> list[SampledToken]:
        """Sample plain sequences: at batch 32, `sample` takes longer than the kernel."""
        count = len(sequences)
        greedy = Warpers(*np.zeros((len(Warpers._fields), count)))
        no_draws = np.zeros(count, np.uint64)
        token_ids = self.runner.sample(logits, greedy, no_draws, no_draws, no_draws).tolist()  # (R,)
        return [sampled(token_id, sequence) for token_id, sequence in zip(token_ids, sequences, strict=True)]

    def _warped(self, logits: Any, warpers: Warpers, r: int) -> np.ndarray:
        return self.runner.filter_logits(
            logits[r : r + 1], Warpers(*(column[r : r + 1] for column in warpers))
        )[0]

    def _with_logprobs(self, token_id: int, scores: np.ndarray, n: int | None) -> SampledToken:
        ids, values, value = self.runner.top_logprobs(scores, token_id, n or 0)
        if n is None:
            return SampledToken(token_id, logprob=float(value))
        best = zip(ids.tolist(), values.tolist(), strict=True)
        logprobs = {i: logprob for i, logprob in best if logprob > -np.inf}  # without removed tokens
        return SampledToken(token_id, {**logprobs, token_id: float(value)}, float(value))


def sampled(token_id: int, sequence: Sequence) -> SampledToken:
    """Return a backend's own choice; a negative id: the logits are not finite."""
    return SampledToken(token_id) if token_id >= 0 else SampledToken(-1, error=not_finite(sequence))


def not_finite(sequence: Sequence, position: int | None = None) -> str:
    cause = "the request's edits gave them" if sequence.params.edits else NOT_FINITE
    position = len(sequence) - 1 if position is None else position
    return f"the model's logits at position {position} are not finite numbers: {cause}."


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


def _draw_exclusions(warpers: Warpers, sequences: Seq[Sequence]) -> None:
    """Turn XTC on in the rows whose own number, by seed, sample and position, is below xtc_probability."""
    for r, sequence in enumerate(sequences):
        params = sequence.params
        share = params.xtc_probability
        if share and uniform(sequence.sample.seed, sequence.index, len(sequence), XTC) < share:
            warpers.xtc_threshold[r] = params.xtc_threshold


def _call(function: Any, all_scores: Any, r: int, sequence: Sequence, state: SamplingState) -> str | None:
    """Replace row r of the scores (R, V) by a user's function's result. Return an error if it fails."""
    scores = all_scores[r]  # (V,)
    if (
        np.isnan(scores).any() and not (scores > -np.inf).any()
    ):  # or a function could hide it from other sequences
        return not_finite(sequence)
    name = f"the logits processor {getattr(function, '__name__', type(function).__name__)}"
    try:
        returned = function(list(state.prompt_token_ids), list(sequence.new_token_ids), scores.copy())
        changed = np.asarray(returned, np.float32)
    except BaseException as error:  # it must not reach the step's other sequences
        return f"{name} raised {error!r} at position {len(sequence)}."
    wrong = f"an array of shape {changed.shape}" if changed.shape != scores.shape else None
    if wrong is None and not (changed < np.inf).all() and (scores < np.inf).all():
        wrong = "NaN or +inf"
    if wrong is None:
        all_scores[r] = changed
        return None
    wanted = f"it must return the scores of {scores.size} tokens, none of them NaN."
    return f"{name} returned {wrong} at position {len(sequence)}: {wanted}"


def _why_none(scores: np.ndarray, sequence: Sequence, state: SamplingState) -> str:
    is_empty = state.changes_scores and not (scores > -np.inf).any() and not np.isnan(scores).any()
    return NOTHING_LEFT.format(len(sequence)) if is_empty else not_finite(sequence)


@dataclass(eq=False)
class PromptLogprobs:
    """Log probabilities of given tokens, filled in during prefill: no position from `first` on is copied."""

    first: int
    targets: list[int]  # targets[i] comes after position first + i of the sequence
    num_best: int  # most probable tokens to report with each target
    found: list[dict[int, float]] = field(
        default_factory=list
    )  # of each target so far: id -> log probability

    @property
    def reported(self) -> list[dict[int, float] | None]:
        return [None, *self.found]  # the first token has none

    @property
    def max_prefix_tokens(self) -> int | float:
        return math.inf if self.is_complete else self.first

    @property
    def is_complete(self) -> bool:
        return len(self.found) == len(self.targets)

    @property
    def logprobs(self) -> list[float]:
        return [found[target] for target, found in zip(self.targets, self.found, strict=False)]

    def error(self, sequence: Sequence) -> str | None:
        wrong = (i for i, logprob in enumerate(self.logprobs) if math.isnan(logprob))
        return next((not_finite(sequence, self.first + i) for i in wrong), None)

    def num_logits(self, start: int, stop: int) -> int:
        return 0 if self.is_complete else max(stop - max(start, self.first), 0)

    def max_count(self, start: int, num_logits: int) -> int | float:
        return math.inf if self.is_complete else max(self.first - start, 0) + num_logits

    def read(self, runner: ModelRunner, logits: np.ndarray) -> None:
        for row, target in zip(logits, self.targets[len(self.found) :], strict=False):
            if np.isfinite(row).all():
                ids, values, value = runner.top_logprobs(row, target, self.num_best)
                self.found.append(
                    {**dict(zip(ids.tolist(), values.tolist(), strict=True)), target: float(value)}
                )
            else:
                self.found.append({target: math.nan})
