"""The fields of SamplingParams as keywords of `generate` and others, for type checkers alone: a test compares both."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict

from .sampling_params import (
    LogitsProcessor,
    LogprobsMode,
    Overflow,
    PresenceRule,
    RepetitionDetection,
    TopPRule,
)


class SamplingKeywords(TypedDict, total=False):
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    n: int
    stop: str | Iterable[str] | None
    stop_token_ids: Iterable[int] | None
    ignore_eos: bool
    logprobs: int | None
    logit_bias: Mapping[int, float] | None
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    presence_penalty_rule: PresenceRule
    no_repeat_ngram_size: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: str | Iterable[str] | None
    bad_words: str | Iterable[str] | None
    bad_words_ids: Iterable[Iterable[int]] | None
    min_tokens: int
    allowed_token_ids: Iterable[int] | None
    suppress_tokens: Iterable[int] | None
    logits_processors: LogitsProcessor | Iterable[LogitsProcessor] | None
    top_p_rule: TopPRule
    top_p_decay: float
    top_p_min: float
    top_p_reset_ids: int | Iterable[int] | None
    min_p: float
    typical_p: float
    epsilon_cutoff: float
    eta_cutoff: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    best_of: int | None
    num_beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    num_beam_groups: int
    diversity_penalty: float
    beam_search_diversity_rate: float
    prompt_lookup_num_tokens: int
    max_matching_ngram_size: int
    eos_token_id: int | Iterable[int] | None
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    max_time: float | None
    repetition_detection: RepetitionDetection | Mapping[str, int] | None
    prompt_logprobs: int | None
    logprobs_mode: LogprobsMode
    overflow: Overflow
    stride: int | None
    soft_prompt: str | None
    lora_request: str | None
    prompt_embeds: Any
    capture: str | Iterable[str] | None
    edits: Any
    guided_choice: Iterable[str] | None
    guided_regex: str | None
    guided_json: str | Mapping[str, Any] | type[Any] | None
    guided_grammar: str | None
