"""choose: from a step's logits to its tokens. Everything between the model and the next token meets here."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from tinygpt.errors import is_ctrl_c
from tinygpt.request.sequence import Sequence
from tinygpt.sampling.metadata import SequenceControls, Warpers, gather_controls, gather_warpers

NOT_FINITE = (
    "the model's logits at position {} are not finite numbers: the checkpoint is damaged, or its activations "
    "overflow float32."
)
NOTHING_LEFT = (
    "the request's controls leave no token to choose at position {}: allow more in allowed_token_ids, or forbid less "
    "with bad_words, suppress_tokens, min_tokens and no_repeat_ngram_size."
)
NOT_SCORES = (
    "the logits processor {} returned {} at position {}: it must return the scores of {} tokens, none of them NaN."
)


@dataclass(frozen=True)
class Chosen:
    """What was chosen for each of R rows of logits, in their order."""

    token_ids: list[int]  # -1 where no token could be chosen: `errors` says why
    logprobs: list[dict[int, float] | None]  # of the most probable tokens and the chosen one, where asked for
    chosen_logprobs: list[float | None]  # of the chosen one, where asked for, or needed to find the best of several
    errors: list[str | None]


def choose(backend: ModuleType, workspace: Any, logits: np.ndarray, sequences: Seq[Sequence]) -> Chosen:
    """Choose each sequence's next token from its row of `logits` (R, V) float32, which may be written over.

    A row's result depends on that row and that sequence alone, to the last bit. Each sequence keeps notes in its
    `controls`, so its tokens may become more from one call to the next, and never change.
    """
    controls = _updated_controls(sequences, logits.shape[1])
    if all(c.is_plain for c in controls):
        return _take_greatest(backend, logits, sequences)
    raw = {r: logits[r].copy() for r, c in enumerate(controls) if c.changes_scores and c.wants_raw_logprobs}
    errors = _process(backend, logits, sequences, controls)
    warpers = gather_warpers(controls)
    token_ids = backend.sample(
        logits,
        warpers,
        np.array([s.seed for s in sequences], np.uint64),
        np.array([s.index for s in sequences], np.uint64),
        np.array([len(s) for s in sequences], np.uint64),
    ).tolist()  # (R,)
    chosen = Chosen(token_ids, [None] * len(token_ids), [None] * len(token_ids), errors)
    for r, token_id in enumerate(token_ids):
        if errors[r] is not None:
            token_ids[r] = -1
        elif token_id < 0:
            errors[r] = _why_none(logits[r], sequences[r], controls[r])
        elif controls[r].wants_logprobs:
            scores = raw.get(r, logits[r]) if controls[r].wants_raw_logprobs else _warped(backend, logits, warpers, r)
            _add_logprobs(backend, chosen, r, scores, sequences[r].params.logprobs)
    return chosen


def is_drawn_alone(sequence: Sequence, vocab_size: int) -> bool:
    """Whether the sequence's tokens depend on its logits and its warpers alone, the same ones for each token."""
    (controls,) = _updated_controls([sequence], vocab_size)
    return not (controls.changes_scores or controls.wants_logprobs or sequence.params.top_p_decay < 1)


def process_scores(backend: ModuleType, scores: np.ndarray, sequences: Seq[Sequence]) -> list[str | None]:
    """Change each sequence's row of `scores` (R, V) float32 as it asks, in place; why its users' functions failed."""
    return _process(backend, scores, sequences, _updated_controls(sequences, scores.shape[1]))


def _take_greatest(backend: ModuleType, logits: np.ndarray, sequences: Seq[Sequence]) -> Chosen:
    """`choose` where no sequence asks for more: at batch 32, the way below would take longer than the kernel does."""
    count = len(sequences)
    greedy, no_draws = Warpers(*np.zeros((len(Warpers._fields), count))), np.zeros(count, np.uint64)
    token_ids = backend.sample(logits, greedy, no_draws, no_draws, no_draws).tolist()  # (R,)
    errors = [None if i >= 0 else NOT_FINITE.format(len(s) - 1) for i, s in zip(token_ids, sequences, strict=True)]
    return Chosen(token_ids, [None] * count, [None] * count, errors)


def _process(
    backend: ModuleType, scores: np.ndarray, sequences: Seq[Sequence], controls: list[SequenceControls]
) -> list[str | None]:
    rows = [r for r, c in enumerate(controls) if c.is_processed]
    if rows:
        backend.process_logits(scores, gather_controls(rows, [controls[r] for r in rows]))
    errors = [None] * len(sequences)
    for r, (sequence, notes) in enumerate(zip(sequences, controls, strict=True)):
        for function in sequence.params.logits_processors:
            errors[r] = errors[r] or _call(function, scores, r, sequence, notes)
    return errors


def _updated_controls(sequences: Seq[Sequence], vocab_size: int) -> list[SequenceControls]:
    for sequence in sequences:
        if sequence.controls is None:
            sequence.controls = SequenceControls(sequence, vocab_size)
        if not sequence.controls.is_plain:
            sequence.controls.update(sequence.new_token_ids)
    return [sequence.controls for sequence in sequences]


def _call(function, all_scores: Any, r: int, sequence: Sequence, notes: SequenceControls) -> str | None:
    """Replace row r of the scores (R, V) by what a user's function makes of it; an error if it fails."""
    scores = all_scores[r]  # (V,)
    name = getattr(function, "__name__", type(function).__name__)
    try:
        returned = function(list(notes.prompt_token_ids), list(sequence.new_token_ids), scores.copy())
        changed = np.asarray(returned, np.float32)
    except BaseException as error:  # whatever it is, it must not reach the step's other sequences
        if is_ctrl_c(error):
            raise
        return f"the logits processor {name} raised {error!r} at position {len(sequence)}."
    if changed.shape != scores.shape:
        return NOT_SCORES.format(name, f"an array of shape {changed.shape}", len(sequence), scores.size)
    if not (changed < np.inf).all() and (scores < np.inf).all():
        return NOT_SCORES.format(name, "NaN or +inf", len(sequence), scores.size)
    all_scores[r] = changed
    return None


def _why_none(scores: np.ndarray, sequence: Sequence, notes: SequenceControls) -> str:
    is_empty = notes.changes_scores and not (scores > -np.inf).any() and not np.isnan(scores).any()
    return NOTHING_LEFT.format(len(sequence)) if is_empty else NOT_FINITE.format(len(sequence) - 1)


def _warped(backend: ModuleType, logits: np.ndarray, warpers: Warpers, r: int) -> np.ndarray:
    """The scores (V,) whose probabilities row r was drawn by."""
    return backend.filter_logits(logits[r : r + 1], Warpers(*(column[r : r + 1] for column in warpers)))[0]


def _add_logprobs(backend: ModuleType, chosen: Chosen, r: int, scores: np.ndarray, n: int | None) -> None:
    token_id = chosen.token_ids[r]
    ids, values, value = backend.top_logprobs(scores, token_id, n or 0)
    chosen.chosen_logprobs[r] = float(value)
    if n is not None:  # tokens that were removed have no logarithm
        best = zip(ids.tolist(), values.tolist(), strict=True)
        chosen.logprobs[r] = {**{i: logprob for i, logprob in best if logprob > -np.inf}, token_id: float(value)}
