"""Controls: what the sequences of a step ask of choosing their tokens, as arrays that any backend reads."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from tinygpt.request.sequence import Sequence

HISTORY_ROOM = 1024  # tokens that a history has room for at first; max_tokens may be any number
TOP_P_RULES = {"hf": 0, "openai": 1, "fastertransformer": 2}


class Ragged(NamedTuple):
    """Arrays of different lengths, end to end."""

    values: np.ndarray
    bounds: np.ndarray  # (count + 1,) int64: array i is values[bounds[i]:bounds[i + 1]]

    @classmethod
    def of(cls, arrays: Seq[np.ndarray]) -> "Ragged":
        """Of one array at least."""
        bounds = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([array.size for array in arrays], out=bounds[1:])
        return cls(np.concatenate(arrays), bounds)

    def part(self, i: int) -> np.ndarray:
        return self.values[self.bounds[i] : self.bounds[i + 1]]


class Controls(NamedTuple):
    """What changes the scores of P rows of logits before a token is chosen; i below is 0 to P - 1."""

    rows: np.ndarray  # (P,) int64, which rows of the logits
    token_ids: Ragged  # int32, the prompt and the output of row i
    num_prompt_tokens: np.ndarray  # (P,) int64
    repetition_penalty: np.ndarray  # (P,) float32
    frequency_penalty: np.ndarray  # (P,) float32
    presence_penalty: np.ndarray  # (P,) float32
    no_repeat_ngram_size: np.ndarray  # (P,) int64, 0 is none
    bias_ids: Ragged  # int32
    biases: Ragged  # float32, one for each of bias_ids
    words: Ragged  # int32, the ids of each word that may not come, of all rows
    word_bounds: np.ndarray  # (P + 1,) int64: row i has the words word_bounds[i] to word_bounds[i + 1] - 1
    allowed_ids: Ragged  # int32, the only ones that may come; empty: all may
    forbidden_ids: Ragged  # int32


class Warpers(NamedTuple):
    """What removes tokens from R rows before one is drawn: SamplingParams' fields, (R,) float64 each."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    top_p_rule: np.ndarray  # TOP_P_RULES
    min_p: np.ndarray
    typical_p: np.ndarray
    epsilon_cutoff: np.ndarray
    eta_cutoff: np.ndarray


class SequenceControls:
    """One sequence's part of both, made once and kept up to date as the sequence grows; it never gets shorter."""

    def __init__(self, sequence: Sequence, vocab_size: int):
        params = self.params = sequence.params
        self.warpers = (
            params.temperature,
            params.top_k,
            params.top_p,
            TOP_P_RULES[params.top_p_rule],
            params.min_p,
            params.typical_p,
            params.epsilon_cutoff,
            params.eta_cutoff,
        )
        self.penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else sequence.eos_token_ids)
        self._ends = _ids(token_id for token_id in ends if token_id < vocab_size) if params.min_tokens else _NO_IDS
        self.bias_ids = _ids(token_id for token_id, _ in params.logit_bias)
        self.biases = np.array([bias for _, bias in params.logit_bias], np.float32)
        self.words = [_ids(word) for word in params.bad_words_ids if word not in {(i,) for i in sequence.eos_token_ids}]
        self.allowed_ids = _ids(params.allowed_token_ids or ())
        self._suppressed_ids = _ids(params.suppress_tokens)
        self._forbidden_at_first = np.concatenate((self._suppressed_ids, self._ends))
        self.uses_history = bool(
            self.penalties != (1.0, 0.0, 0.0)
            or params.no_repeat_ngram_size
            or any(word.size > 1 for word in self.words)
        )
        is_edited = self.words or params.logit_bias or params.allowed_token_ids or params.suppress_tokens
        self.is_processed = bool(self.uses_history or is_edited or self._ends.size)
        self.changes_scores = bool(self.is_processed or params.logits_processors)
        is_ranked = params.best_of is not None and params.best_of > params.n
        self.wants_logprobs = params.logprobs is not None or is_ranked
        # Greedy and nothing more, for good: the token with the greatest logit.
        self.is_plain = params.temperature == 0 and not self.changes_scores and not self.wants_logprobs
        self.wants_raw_logprobs = self.wants_logprobs and params.logprobs_mode == "raw"
        # Rows of soft prompts have ids below 0, and are no tokens that could come again.
        self.prompt_token_ids = [token_id for token_id in sequence.prompt_token_ids if token_id >= 0]
        self._token_ids = self._new_history() if self.uses_history else _NO_IDS
        self._num_new = 0

    def update(self, new_token_ids: list[int]) -> None:
        """Take notice of the tokens that were chosen since the last time."""
        added = new_token_ids[self._num_new :]
        if not added:
            return
        if self.uses_history:
            start = len(self.prompt_token_ids) + self._num_new
            if start + len(added) > self._token_ids.size:
                more = np.empty(self._token_ids.size + len(added), np.int32)
                self._token_ids = np.concatenate((self._token_ids, more))
            self._token_ids[start : start + len(added)] = added
        if self.params.top_p_decay < 1:
            self._decay(added)
        self._num_new += len(added)

    @property
    def token_ids(self) -> np.ndarray:
        """The prompt and the output, where a control looks at them; otherwise nothing."""
        return self._token_ids[: len(self.prompt_token_ids) + self._num_new]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def forbidden_ids(self) -> np.ndarray:
        return self._forbidden_at_first if self._num_new < self.params.min_tokens else self._suppressed_ids

    def _new_history(self) -> np.ndarray:
        history = np.empty(len(self.prompt_token_ids) + min(self.params.max_tokens, HISTORY_ROOM), np.int32)
        history[: len(self.prompt_token_ids)] = self.prompt_token_ids
        return history

    def _decay(self, added: list[int]) -> None:
        temperature, top_k, top_p, *others = self.warpers
        for token_id in added:
            is_reset = token_id in (self.params.top_p_reset_ids or ())
            top_p = self.params.top_p if is_reset else max(top_p * self.params.top_p_decay, self.params.top_p_min)
        self.warpers = (temperature, top_k, top_p, *others)


def gather_controls(rows: Seq[int], of_rows: Seq[SequenceControls]) -> Controls:
    """The controls of `rows`, of one row at least."""
    repetition, frequency, presence = np.array([c.penalties for c in of_rows], np.float32).T.copy()
    words = [word for c in of_rows for word in c.words]
    return Controls(
        rows=np.array(rows, np.int64),
        token_ids=Ragged.of([c.token_ids for c in of_rows]),
        num_prompt_tokens=np.array([c.num_prompt_tokens for c in of_rows], np.int64),
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        no_repeat_ngram_size=np.array([c.params.no_repeat_ngram_size for c in of_rows], np.int64),
        bias_ids=Ragged.of([c.bias_ids for c in of_rows]),
        biases=Ragged.of([c.biases for c in of_rows]),
        words=Ragged.of(words) if words else _NO_WORDS,
        word_bounds=np.cumsum([0, *(len(c.words) for c in of_rows)]),
        allowed_ids=Ragged.of([c.allowed_ids for c in of_rows]),
        forbidden_ids=Ragged.of([c.forbidden_ids for c in of_rows]),
    )


def gather_warpers(of_rows: Seq[SequenceControls]) -> Warpers:
    return Warpers(*np.array([c.warpers for c in of_rows], np.float64).reshape(-1, len(Warpers._fields)).T.copy())


def _ids(token_ids: Iterable[int]) -> np.ndarray:
    return np.array(list(token_ids), np.int32)


_NO_IDS = _ids(())
_NO_WORDS = Ragged(_NO_IDS, np.zeros(1, np.int64))
