"""SamplingFields: what a request may say of how its tokens are chosen, and the SamplingParams that this makes."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tinygpt.guided_grammar import MAX_CHARACTERS
from tinygpt.sampling_params import SamplingParams
from tinygpt.server.protocol.fields import (
    MAX_BIAS,
    AnyTokenIds,
    Bias,
    Count,
    CountOrAll,
    NumLogprobs,
    Penalty,
    Positive,
    Samples,
    Seed,
    Share,
    Strict,
    Text,
    TokenIds,
    WholeTokenId,
)

DEFAULT_TEMPERATURE = 1.0  # OpenAI's
MAX_STOP_STRINGS = 64  # evaluation harnesses send all of a task's
MAX_BIASED = 1000  # characters, of an id or a text
MAX_WORDS = 10_000  # that may not come: every step looks for each
CONVERTED = {"use_beam_search", "seed", "logit_bias", "repetition_detection"}  # fields that are otherwise there
Choices = Annotated[list[Text], Field(min_length=1, fail_fast=True)]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]
Schema = dict[str, Any] | Pattern


def _to_the_first_error(given: Any) -> Any:
    """What pydantic has for lists, and not for dicts."""
    for key, bias in given.items() if isinstance(given, dict) else ():
        if len(key) > MAX_BIASED or type(bias) not in (int, float) or not abs(bias) <= MAX_BIAS:
            return {key: bias}
    return given


Biases = Annotated[dict[Annotated[str, Field(max_length=MAX_BIASED)], Bias], BeforeValidator(_to_the_first_error)]


class RepetitionDetectionFields(Strict):
    max_pattern_size: Positive
    min_count: Annotated[int, Field(ge=2)]
    min_pattern_size: Positive = 1


class SamplingFields(Strict):
    """The fields of SamplingParams that can be sent, by their names there, which are OpenAI's and vLLM's."""

    n: Samples | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Share | None = None
    top_k: CountOrAll | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Share | None = None
    epsilon_cutoff: Annotated[float, Field(ge=0, lt=1)] | None = None
    eta_cutoff: Annotated[float, Field(ge=0, lt=1)] | None = None
    top_p_rule: Literal["hf", "openai", "fastertransformer"] | None = None
    top_p_decay: Share | None = None
    top_p_min: Share | None = None
    top_p_reset_ids: TokenIds | None = None
    seed: Seed | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = Field(
        None, description=f"a text or a list of up to {MAX_STOP_STRINGS} texts, none of them empty"
    )
    stop_token_ids: AnyTokenIds | None = None
    eos_token_id: WholeTokenId | TokenIds | None = Field(None, description="a token id or a list of them")
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    include_stop_str_in_output: bool | None = None
    max_time: Annotated[float, Field(gt=0)] | None = None
    repetition_detection: RepetitionDetectionFields | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] | None = None
    no_repeat_ngram_size: Count | None = None
    logit_bias: Biases | None = None
    bad_words: Text | Annotated[list[Text], Field(max_length=MAX_WORDS, fail_fast=True)] | None = Field(
        None, description=f"a text or a list of up to {MAX_WORDS} texts, none of them empty"
    )
    bad_words_ids: Annotated[list[TokenIds], Field(max_length=MAX_WORDS, fail_fast=True)] | None = None
    allowed_token_ids: TokenIds | None = None
    suppress_tokens: AnyTokenIds | None = None
    use_beam_search: bool | None = None
    num_beams: Annotated[int, Field(ge=1, le=1000)] | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = Field(None, description='true, false or "never"')
    num_beam_groups: Annotated[int, Field(ge=1, le=1000)] | None = None
    diversity_penalty: Annotated[float, Field(ge=0, le=1e6)] | None = None
    prompt_lookup_num_tokens: Count | None = None
    max_matching_ngram_size: Positive | None = None
    prompt_logprobs: NumLogprobs | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    overflow: Literal["refuse", "clamp", "truncate", "slide"] | None = None
    stride: Positive | None = None
    soft_prompt: Text | None = None
    guided_choice: Choices | None = None
    guided_regex: Pattern | None = None
    guided_json: Schema | None = Field(None, description="a JSON schema, or the same as a text")
    guided_grammar: Pattern | None = None

    def sampling_params(self, encode: Callable[[str], list[int]], **others: Any) -> SamplingParams:
        """encode: for the texts among logit_bias's keys. others: fields that each kind of request has its own way to
        ask for; None is as if it were not there."""
        names = (self.model_fields_set - CONVERTED) & SamplingFields.model_fields.keys()
        given = {name: getattr(self, name) for name in names} | others
        given = {name: value for name, value in given.items() if value is not None}
        if self.use_beam_search and "num_beams" not in given:
            given["num_beams"] = self.n or 1
        if self.repetition_detection is not None:
            given["repetition_detection"] = self.repetition_detection.model_dump()
        given.setdefault("temperature", 0.0 if given.get("num_beams", 1) > 1 else DEFAULT_TEMPERATURE)
        return SamplingParams(seed=_seed(self.seed), logit_bias=_biases(self.logit_bias or {}, encode), **given)

    def name_of(self, field: str) -> str | None:
        is_other = field == "num_beams" and self.num_beams is None and self.use_beam_search
        return "use_beam_search" if is_other else super().name_of(field)


def _seed(seed: int | None) -> int | None:
    """OpenAI's seeds are signed 64 bits, the engine's unsigned; -1 is none, as in vLLM."""
    return None if seed in (None, -1) else seed % 2**64


def _biases(given: Mapping[str, float], encode: Callable[[str], list[int]]) -> dict[int, float]:
    """A key is a token id in decimal, or else a text, all of whose tokens are meant."""
    found: dict[int, float] = {}
    for key, bias in given.items():
        found |= dict.fromkeys([int(key)] if key.isascii() and key.isdigit() else encode(key), bias)
    return found
