"""Sampling metadata: what the sequences of a step ask of the sampler, as arrays that any backend reads."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tinygpt.request.sequence import Sequence
from tinygpt.sampling_params import SamplingParams

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


class Processors(NamedTuple):
    """What changes the scores of P rows of logits before a token is sampled; i below is 0 to P - 1."""

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


@dataclass(frozen=True)
class Edits:
    """The tokens that a request favours, forbids or alone allows, as arrays of ids (int32)."""

    bias_ids: np.ndarray
    biases: np.ndarray  # float32, one for each of bias_ids
    words: list[np.ndarray]  # the ids of each word that may not come
    allowed_ids: np.ndarray  # empty: all may come
    suppressed_ids: np.ndarray
    forbidden_at_first: np.ndarray  # until there are min_tokens: the suppressed ones, EOS and those that stop

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: frozenset[int], vocab_size: int) -> "Edits":
        ends = eos_token_ids.union(params.stop_token_ids)  # even with ignore_eos, as in vLLM
        ends = _ids(token_id for token_id in ends if token_id < vocab_size) if params.min_tokens else _NO_IDS
        suppressed_ids = _ids(params.suppress_tokens)
        return cls(
            bias_ids=_ids(token_id for token_id, _ in params.logit_bias),
            biases=np.array([bias for _, bias in params.logit_bias], np.float32),
            words=[_ids(word) for word in params.bad_words_ids if word not in {(i,) for i in eos_token_ids}],
            allowed_ids=_ids(params.allowed_token_ids or ()),
            suppressed_ids=suppressed_ids,
            forbidden_at_first=np.concatenate((suppressed_ids, ends)),
        )

    @property
    def is_empty(self) -> bool:
        return not (self.words or self.bias_ids.size or self.allowed_ids.size or self.forbidden_at_first.size)


class SamplingState:
    """What one sequence asks of the sampler, made once and kept up to date as it grows; it never gets shorter."""

    def __init__(self, sequence: Sequence, vocab_size: int):
        params = self.params = sequence.params
        self.warpers = warpers_of(params)
        self.penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self.edits = Edits.of(params, sequence.eos_token_ids, vocab_size)
        has_penalties = self.penalties != (1.0, 0.0, 0.0) or params.no_repeat_ngram_size
        self.uses_history = bool(has_penalties or any(word.size > 1 for word in self.edits.words))
        self.is_processed = self.uses_history or not self.edits.is_empty
        self.changes_scores = bool(self.is_processed or params.logits_processors or sequence.guide)
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
        """Add the tokens sampled since the last call."""
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
        """The prompt and the output, where a processor looks at them; otherwise nothing."""
        return self._token_ids[: len(self.prompt_token_ids) + self._num_new]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def forbidden_ids(self) -> np.ndarray:
        is_early = self._num_new < self.params.min_tokens
        return self.edits.forbidden_at_first if is_early else self.edits.suppressed_ids

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


def warpers_of(params: SamplingParams) -> tuple[float, ...]:
    """One row's values of Warpers."""
    given = {name: getattr(params, name) for name in Warpers._fields}
    return tuple({**given, "top_p_rule": TOP_P_RULES[params.top_p_rule]}.values())


def gather_processors(rows: Seq[int], states: Seq[SamplingState]) -> Processors:
    """What the sequences of `rows` ask for, of one row at least."""
    repetition, frequency, presence = np.array([s.penalties for s in states], np.float32).T.copy()
    words = [word for s in states for word in s.edits.words]
    return Processors(
        rows=np.array(rows, np.int64),
        token_ids=Ragged.of([s.token_ids for s in states]),
        num_prompt_tokens=np.array([s.num_prompt_tokens for s in states], np.int64),
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        no_repeat_ngram_size=np.array([s.params.no_repeat_ngram_size for s in states], np.int64),
        bias_ids=Ragged.of([s.edits.bias_ids for s in states]),
        biases=Ragged.of([s.edits.biases for s in states]),
        words=Ragged.of(words) if words else _NO_WORDS,
        word_bounds=np.cumsum([0, *(len(s.edits.words) for s in states)]),
        allowed_ids=Ragged.of([s.edits.allowed_ids for s in states]),
        forbidden_ids=Ragged.of([s.forbidden_ids for s in states]),
    )


def gather_warpers(states: Seq[SamplingState]) -> Warpers:
    return Warpers(*np.array([s.warpers for s in states], np.float64).reshape(-1, len(Warpers._fields)).T.copy())


def _ids(token_ids: Iterable[int]) -> np.ndarray:
    return np.array(list(token_ids), np.int32)


_NO_IDS = _ids(())
_NO_WORDS = Ragged(_NO_IDS, np.zeros(1, np.int64))
