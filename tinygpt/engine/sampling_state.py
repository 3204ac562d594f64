"""SamplingState: the options of one sequence as the sampler needs them, and of a step's sequences as arrays."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from tinygpt.engine.sequence import Sequence
from tinygpt.sampling_params import SamplingParams

HISTORY_ROOM = 1024  # tokens for which a history has room at first
TOP_P_RULES = {"hf": 0, "openai": 1, "fastertransformer": 2}


class Ragged(NamedTuple):
    """Arrays of different lengths, end to end."""

    values: np.ndarray
    bounds: np.ndarray  # (count + 1,) int64: array i is values[bounds[i]:bounds[i + 1]]

    @classmethod
    def of(cls, arrays: Seq[np.ndarray]) -> "Ragged":
        """Lay one array or more end to end."""
        bounds = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([array.size for array in arrays], out=bounds[1:])
        return cls(np.concatenate(arrays), bounds)

    def part(self, i: int) -> np.ndarray:
        return self.values[self.bounds[i] : self.bounds[i + 1]]


class Processors(NamedTuple):
    """Logits processors of P rows of logits; i below is 0 to P - 1."""

    rows: np.ndarray  # (P,) int64, indices of the rows
    token_ids: Ragged  # int32, the prompt and the output of row i
    num_prompt_tokens: np.ndarray  # (P,) int64
    repetition_penalty: np.ndarray  # (P,) float32
    frequency_penalty: np.ndarray  # (P,) float32
    presence_penalty: np.ndarray  # (P,) float32
    no_repeat_ngram_size: np.ndarray  # (P,) int64, 0 is none
    bias_ids: Ragged  # int32
    biases: Ragged  # float32, one for each of bias_ids
    words: Ragged  # int32, the ids of each forbidden word, of all rows
    word_bounds: np.ndarray  # (P + 1,) int64: row i has the words word_bounds[i] to word_bounds[i + 1] - 1
    allowed_ids: Ragged  # int32; empty: all may come
    forbidden_ids: Ragged  # int32


class Warpers(NamedTuple):
    """Filters of R rows before a token is drawn: SamplingParams' fields, (R,) float64 each."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    top_p_rule: np.ndarray  # TOP_P_RULES
    min_p: np.ndarray
    typical_p: np.ndarray
    epsilon_cutoff: np.ndarray
    eta_cutoff: np.ndarray


class SamplingState:
    """The sampler's state of one sequence, which never gets shorter."""

    def __init__(self, sequence: Sequence, vocab_size: int):
        params = self.params = sequence.params
        self.warpers = warpers_of(params)
        self.penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self.bias_ids = _ids(token_id for token_id, _ in params.logit_bias)
        self.biases = np.array([bias for _, bias in params.logit_bias], np.float32)
        self.words = [_ids(word) for word in params.bad_words_ids if word not in {(i,) for i in sequence.eos_token_ids}]
        self.allowed_ids = _ids(params.allowed_token_ids or ())
        self._suppressed_ids = _ids(params.suppress_tokens)
        ends = sequence.eos_token_ids.union(params.stop_token_ids)  # even with ignore_eos, as in vLLM
        ends = _ids(token_id for token_id in ends if token_id < vocab_size) if params.min_tokens else _NO_IDS
        self._forbidden_at_first = np.concatenate((self._suppressed_ids, ends))  # until there are min_tokens
        has_edits = self.words or self.bias_ids.size or self.allowed_ids.size or self._forbidden_at_first.size
        has_penalties = self.penalties != (1.0, 0.0, 0.0) or params.no_repeat_ngram_size
        self._uses_history = bool(has_penalties or any(word.size > 1 for word in self.words))
        self.is_processed = bool(self._uses_history or has_edits)
        self.changes_scores = bool(self.is_processed or params.logits_processors or sequence.guide)
        self.wants_logprobs = params.logprobs is not None or (params.best_of is not None and params.best_of > params.n)
        self.wants_raw_logprobs = self.wants_logprobs and params.logprobs_mode == "raw"
        # Greedy and nothing more, for good: the token with the greatest logit.
        self.is_plain = params.temperature == 0 and not self.changes_scores and not self.wants_logprobs
        # Rows of soft prompts have ids below 0, which never come again.
        self.prompt_token_ids = [token_id for token_id in sequence.prompt_token_ids if token_id >= 0]
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self._history = _NO_IDS
        if self._uses_history:
            self._history = np.empty(self.num_prompt_tokens + min(params.max_tokens, HISTORY_ROOM), np.int32)
            self._history[: self.num_prompt_tokens] = self.prompt_token_ids
        self._num_new = 0

    def update(self, new_token_ids: list[int]) -> None:
        added = new_token_ids[self._num_new :]
        if not added:
            return
        if self._uses_history:
            start = self.num_prompt_tokens + self._num_new
            if start + len(added) > self._history.size:
                more = np.empty(self._history.size + len(added), np.int32)
                self._history = np.concatenate((self._history, more))
            self._history[start : start + len(added)] = added
        if self.params.top_p_decay < 1:
            self._decay(added)
        self._num_new += len(added)

    @property
    def token_ids(self) -> np.ndarray:
        """The prompt and the output if a processor reads them; otherwise none."""
        return self._history[: self.num_prompt_tokens + self._num_new]

    @property
    def forbidden_ids(self) -> np.ndarray:
        return self._forbidden_at_first if self._num_new < self.params.min_tokens else self._suppressed_ids

    def _decay(self, added: list[int]) -> None:
        temperature, top_k, top_p, *others = self.warpers
        for token_id in added:
            is_reset = token_id in (self.params.top_p_reset_ids or ())
            top_p = self.params.top_p if is_reset else max(top_p * self.params.top_p_decay, self.params.top_p_min)
        self.warpers = (temperature, top_k, top_p, *others)


def warpers_of(params: SamplingParams) -> tuple[float, ...]:
    given = {name: getattr(params, name) for name in Warpers._fields}
    return tuple({**given, "top_p_rule": TOP_P_RULES[params.top_p_rule]}.values())


def gather_processors(rows: Seq[int], states: Seq[SamplingState]) -> Processors:
    """Return the processors of the sequences with these rows, at least one."""
    repetition, frequency, presence = np.array([s.penalties for s in states], np.float32).T.copy()
    words = [word for s in states for word in s.words]
    return Processors(
        rows=np.array(rows, np.int64),
        token_ids=Ragged.of([s.token_ids for s in states]),
        num_prompt_tokens=np.array([s.num_prompt_tokens for s in states], np.int64),
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        no_repeat_ngram_size=np.array([s.params.no_repeat_ngram_size for s in states], np.int64),
        bias_ids=Ragged.of([s.bias_ids for s in states]),
        biases=Ragged.of([s.biases for s in states]),
        words=Ragged.of(words) if words else Ragged(_NO_IDS, np.zeros(1, np.int64)),
        word_bounds=np.cumsum([0, *(len(s.words) for s in states)]),
        allowed_ids=Ragged.of([s.allowed_ids for s in states]),
        forbidden_ids=Ragged.of([s.forbidden_ids for s in states]),
    )


def gather_warpers(states: Seq[SamplingState]) -> Warpers:
    return Warpers(*np.array([s.warpers for s in states], np.float64).reshape(-1, len(Warpers._fields)).T.copy())


def _ids(token_ids: Iterable[int]) -> np.ndarray:
    return np.array(list(token_ids), np.int32)


_NO_IDS = _ids(())
