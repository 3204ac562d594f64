"""What a sample's tokens are chosen by: what was asked, rules of ids, the sampler's state."""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..kernels.numbers import ALL_TOKENS
from ..kernels.reference import sampling
from ..outputs import OnChunk
from ..sampling_params import LogitsProcessor, SamplingParams
from .prompts import VirtualTokens, Window

NOT_FINITE = "the checkpoint is damaged, or its activations overflow float32"
XTC = 1  # the use of a number that decides whether tokens are excluded
Filter = tuple[Callable[[np.ndarray, float], np.ndarray], float]  # scores (V,) = f(scores, value)
# The first token of a text of dry_sequence_breakers -> the others of each such text.
Breakers = Mapping[int, list[tuple[int, ...]]]


@dataclass(frozen=True, eq=False)
class TokenRules:
    """The token ids of params as arrays and functions, which the samples of a request share."""

    bias_ids: np.ndarray  # int32
    biases: np.ndarray  # float32
    processors: tuple[LogitsProcessor, ...]  # those of `sampling.processors_of`
    unwritten: range = range(0)  # ids of no token
    num_tokens: int = ALL_TOKENS  # a token is chosen among so many first ids

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        breakers: Breakers,
        unwritten: range = range(0),
    ) -> "TokenRules":
        """unwritten: the vocabulary's last ids if they are of no token, which come only if params name them."""
        known = {token_id for token_id in eos_token_ids if token_id < vocab_size}
        biases = dict(params.logit_bias)
        named = {*biases, *known, *params.stop_token_ids, *(params.allowed_token_ids or ())}
        names_unwritten = not named.isdisjoint(unwritten)
        if names_unwritten:
            biases |= dict.fromkeys(set(unwritten) - named, -np.inf)
        return cls(
            bias_ids=np.array([*biases], np.int32),
            biases=np.array([*biases.values()], np.float32),
            processors=sampling.processors_of(params, known, breakers),
            unwritten=unwritten,
            num_tokens=unwritten.start if unwritten and not names_unwritten else vocab_size,
        )


NO_RULES = TokenRules(np.empty(0, np.int32), np.empty(0, np.float32), ())


@dataclass(frozen=True, eq=False)
class Sample:
    """What was asked of each sample of a request."""

    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    deadline: float | None = None  # by time.perf_counter()
    window: Window | None = None
    on_chunk: OnChunk | None = None  # called with each token's text during the step
    soft_prompt: VirtualTokens | None = None  # the ids below 0 at the prompt's beginning
    adapter: int = -1  # of the LLM's lora_modules
    token_rules: TokenRules | None = None

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        eos = frozenset() if self.params.ignore_eos else self.eos_token_ids
        return eos.union(self.params.stop_token_ids)


class SamplingState:
    """The sampler's state of one sequence, which never gets shorter."""

    def __init__(self, sample: Sample, is_guided: bool):
        params = sample.params
        rules = sample.token_rules or NO_RULES
        self.seed = sample.seed
        self.params = params
        self.rules = rules
        is_ft = params.presence_penalty_rule == "fastertransformer"
        presence = params.presence_penalty * (params.temperature or 1 if is_ft else 1)
        self.penalties = params.repetition_penalty, params.frequency_penalty, presence
        self._has_penalties = self.penalties != (1.0, 0.0, 0.0)
        self.is_processed = self._has_penalties or rules.bias_ids.size > 0
        # Rows of soft prompts have ids below 0, which never come again.
        self.prompt_token_ids = [token_id for token_id in sample.prompt_token_ids if token_id >= 0]
        self.num_prompt_tokens = 0 if is_ft else len(self.prompt_token_ids)  # that no presence penalty counts
        self.calls_functions = bool(rules.processors or params.logits_processors or is_guided)
        self.changes_scores = self.is_processed or self.calls_functions
        self.wants_logprobs = params.logprobs is not None or params.num_samples > params.n
        self.wants_raw_logprobs = self.wants_logprobs and params.logprobs_mode == "raw"
        self.is_plain = params.temperature == 0 and not self.changes_scores and not self.wants_logprobs
        self.top_p = params.top_p
        self._filters = sampling.filters_of(params, params.top_p, excludes_top=False)
        self._history = array("i", self.prompt_token_ids if self._has_penalties else ())
        self._num_new = 0

    def update(self, new_token_ids: list[int]) -> None:
        added = new_token_ids[self._num_new :]
        if self._has_penalties:
            self._history.extend(added)
        params = self.params
        if params.top_p_decay < 1:
            for token_id in added:
                is_reset = token_id in (params.top_p_reset_ids or ())
                decayed = max(self.top_p * params.top_p_decay, params.top_p_min)
                self.top_p = params.top_p if is_reset else decayed
            self._filters = sampling.filters_of(params, self.top_p, excludes_top=False)
        self._num_new += len(added)

    @property
    def token_ids(self) -> np.ndarray:
        return np.array(self._history, np.int32)

    def filters(self, index: int, position: int) -> list[Filter]:
        """Return all filters of a draw if the backend lacks one of them, otherwise none."""
        share = self.params.xtc_probability
        if share and sampling.uniform(self.seed, index, position, XTC) < share:
            return sampling.filters_of(self.params, self.top_p, excludes_top=True)
        return self._filters


def not_finite(position: int, has_edits: bool) -> str:
    cause = "the request's edits gave them" if has_edits else NOT_FINITE
    return f"the model's logits at position {position} are not finite numbers: {cause}."
