"""What a request may ask of decoding: the fields, their defaults and their limits."""

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from tinygpt import validation as read
from tinygpt.errors import RequestError
from tinygpt.guided_grammar import FIELDS as GUIDED_FIELDS

MAX_SEED = 2**64 - 1
MAX_SAMPLES = 10_000  # of one prompt: all of them are kept in memory until the last is finished
MAX_BEAMS = 1000  # each looks at as many candidates again
MAX_DIVERSITY_PENALTY = 1e6  # log probabilities are small beside it, and are still to count
MAX_LENGTH_PENALTY = 10.0  # length**penalty has to be a float32
MAX_BIAS = 100.0  # OpenAI's limit
MAX_PENALTY = 2.0  # OpenAI's limit for presence and frequency
ALL = -1  # as a number of log probabilities
# Logits are float32: divided by less than this, they overflow to infinity.
MIN_TEMPERATURE = 1e-30
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3

# f(prompt_token_ids, new_token_ids, scores (V,) float32) -> scores (V,)
LogitsProcessor = Callable[[list[int], list[int], Any], Any]

_Class = TypeVar("_Class", bound=type)


def _refuse_unknown_fields(cls: _Class) -> _Class:
    cls.__init__ = read.known_keywords("sampling field", cls.__name__)(cls.__init__)
    return cls


@_refuse_unknown_fields
@dataclass(frozen=True)
class RepetitionDetection:
    """When a sample counts as looping: its last tokens are one pattern, `min_count` times in a row (vLLM's fields).

    max_pattern_size, min_pattern_size: how many tokens a pattern may have, 1 or more.
    min_count: how often it must stand there, 2 or more.
    """

    max_pattern_size: int
    min_count: int
    min_pattern_size: int = 1

    def __post_init__(self):
        _read_fields(self, _REPETITION_RULES)
        if self.min_pattern_size > self.max_pattern_size:
            raise RequestError(
                f"min_pattern_size={self.min_pattern_size} is not possible with "
                f"max_pattern_size={self.max_pattern_size}: it must be that or less."
            )


@_refuse_unknown_fields
@dataclass(frozen=True, repr=False)
class SamplingParams:
    """How to choose the tokens of one request. A RequestError (a ValueError) names every impossible value.

    max_tokens: tokens to generate at most, 1 or more.
    temperature: what logits are divided by; 0 is greedy (the most probable token, ties to the lowest id).
    top_k: only the k most probable tokens stay, and those tied with the k-th; 0 (or -1) is off.
    top_p: of those, only the most probable stay that reach probability p, the last one included; 1.0 is off.
    seed: 0 to 2**64 - 1; the same seed and prompt give the same tokens. None (or -1): the engine draws one.
    n: samples per prompt, 1 to 10 000. Greedy ones are equal: one is computed, and given n times.
    stop: text, or several texts, that ends a sample and is cut off it. All of it has to be new: one that begins in the
        prompt does not count (in vLLM neither, in Hugging Face's it does).
    stop_token_ids: token ids that end a sample, and whose text is cut off.
    ignore_eos: go on past the end-of-text token.
    logprobs: how many of the most probable tokens to report at each step (0: the sampled one alone; -1: all).

    What follows changes the scores before a token is sampled, greedily or not, in this order:
    logit_bias: {token id: number from -100 to 100 that is added}.
    repetition_penalty: scores of tokens in the prompt or the output are divided by it, negative ones multiplied; 1 is
        off.
    frequency_penalty, presence_penalty: subtracted for each time, and once, that a token stands in the output; -2 to 2.
    no_repeat_ngram_size: no run of so many tokens comes twice in prompt and output; 0 is off.
    bad_words, bad_words_ids: texts (with and without a space before them), and token ids, that may not come. The
        end-of-text token by itself is left out of them, as in Hugging Face's: use suppress_tokens or ignore_eos.
    min_tokens: before there are so many tokens, neither the end-of-text token (even with ignore_eos) nor stop_token_ids
        may come. No stop text ends a sample that is complete within them, and no loop before the last of them.
    allowed_token_ids: only these may come.
    suppress_tokens: token ids that may not come.
    logits_processors: functions f(prompt_token_ids, new_token_ids, scores) -> scores, (V,) float32 both.

    And what follows removes tokens, in this order after top_k and top_p, where temperature is above 0:
    top_p_rule: "hf" as above; "openai" (its GPT-2 code): the token that crosses p goes too, unless it is the first;
        "fastertransformer": it stays with the part of its probability that lies within p.
    top_p_decay, top_p_min, top_p_reset_ids: after each token p becomes max(p * decay, min), and what it was at first
        after a token of top_p_reset_ids (Lee et al., "Factuality Enhanced Language Models", 2022); decay 1 is off.
    min_p: tokens go that are less than min_p times as probable as the most probable one; 0 is off.
    typical_p: those stay whose information is nearest to the expected, up to probability p (Meister et al., 2022); 1
        is off.
    epsilon_cutoff: tokens less probable than this go; 0 is off.
    eta_cutoff: as epsilon_cutoff, lowered where the distribution is flat (Hewitt et al., 2022); 0 is off.

    best_of: samples to make, of which those n are returned whose tokens have the highest mean log probability (as
        logprobs_mode has it), the best first; None is n.
    num_beams: above 1, beam search: n is how many of its sequences are returned, the best first. temperature has to be
        0: there is no beam sampling.
    length_penalty: sequences are ranked by their log probability over length**length_penalty.
    early_stopping: when the search ends: True, as soon as num_beams sequences have ended; False, when the best beam
        would not be among them if it ended now; "never", when it cannot come among them any more.
    num_beam_groups: groups that the beams are divided into, each of which avoids what those before it chose.
    diversity_penalty: how much: taken off a token's score for each beam of an earlier group that chose it.
    prompt_lookup_num_tokens: tokens to draft for each step, those that followed the last few before; 0 is off. Results
        are the same; it saves steps where a text repeats itself. A beam search takes no drafts.
    max_matching_ngram_size: how many of the last tokens have to be the same, at most.
    eos_token_id: end-of-text token or tokens in place of the checkpoint's.
    include_stop_str_in_output: leave what ended a sample in its text: the stop text, or that of the stop token.
    max_time: seconds from the request's arrival after which it ends with what it has.
    repetition_detection: end a sample that loops: a RepetitionDetection, or a dict of its fields. One that loops with
        the last of max_tokens has ended by its length.
    prompt_logprobs: as logprobs, for the tokens of the prompt; for its first ones alone where max_time ends it before.
    logprobs_mode: "raw", the model's own probabilities, or "processed", those that the token was sampled from.
    overflow: what to do if prompt and max_tokens are more than there are positions: "refuse"; "clamp" max_tokens to
        what fits; "truncate" the prompt's beginning until it fits; "slide": whenever all positions are full, the oldest
        `stride` tokens leave and the others are read again from position 0, so that there is no end.
    stride: for "slide"; None is half the positions.

    What the text has to be, from its first new token to its last (one of these; vLLM's names). Other tokens get the
    probability 0, after all that is above and your logits_processors. EOS and stop_token_ids may come exactly where the
    text may end; where it can only end, the sample ends, whatever min_tokens and ignore_eos say. max_tokens, max_time
    and stop may end it before:
    guided_choice: one of these texts.
    guided_regex: what the whole of this regular expression matches (Rust's syntax, without look-around).
    guided_json: JSON by this schema, a dict or JSON text; {} is any JSON.
    guided_grammar: a context-free grammar in Lark's syntax or llama.cpp's (GBNF).

    What stands in front of the prompt, in place of words:
    soft_prompt: the name of one of the LLM's soft prompts.
    prompt_embeds: or an array (P, n_embd) of float32: embeddings of tokens that the vocabulary does not have.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    n: int = 1
    stop: str | Iterable[str] | None = None  # kept as tuple[str, ...]
    stop_token_ids: Iterable[int] | None = None  # kept as tuple[int, ...]
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None  # kept as tuple[tuple[int, float], ...]
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    bad_words: str | Iterable[str] | None = None  # kept as tuple[str, ...]
    bad_words_ids: Iterable[Iterable[int]] | None = None  # kept as tuple[tuple[int, ...], ...]
    min_tokens: int = 0
    allowed_token_ids: Iterable[int] | None = None  # kept as tuple[int, ...] | None
    suppress_tokens: Iterable[int] | None = None  # kept as tuple[int, ...]
    logits_processors: LogitsProcessor | Iterable[LogitsProcessor] | None = None  # kept as tuple
    top_p_rule: Literal["hf", "openai", "fastertransformer"] = "hf"
    top_p_decay: float = 1.0
    top_p_min: float = 1e-6
    top_p_reset_ids: int | Iterable[int] | None = None  # kept as tuple[int, ...] | None
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    best_of: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    prompt_lookup_num_tokens: int = 0
    max_matching_ngram_size: int = 2
    eos_token_id: int | Iterable[int] | None = None  # kept as tuple[int, ...] | None
    include_stop_str_in_output: bool = False
    max_time: float | None = None
    repetition_detection: RepetitionDetection | Mapping[str, int] | None = None  # kept as RepetitionDetection | None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    overflow: Literal["refuse", "clamp", "truncate", "slide"] = "refuse"
    stride: int | None = None
    soft_prompt: str | None = None
    prompt_embeds: Any = field(default=None, repr=False)  # kept as an array
    guided_choice: Iterable[str] | None = None  # kept as tuple[str, ...] | None
    guided_regex: str | None = None
    guided_json: str | Mapping[str, Any] | None = None  # kept as str | None
    guided_grammar: str | None = None

    def __post_init__(self):
        _read_fields(self, _RULES)
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"best_of={self.best_of} is not possible with n={self.n}: it must be n or more.")
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is not possible with max_tokens={self.max_tokens}: it must be "
                "max_tokens or less."
            )
        if self.soft_prompt is not None and self.prompt_embeds is not None:
            raise RequestError(f"soft_prompt={self.soft_prompt!r} and prompt_embeds are both given: give one of them.")
        if self.stride is not None and self.overflow != "slide":
            raise RequestError(f"stride={self.stride} is for overflow='slide': set that too, or leave stride out.")
        if len(guided := [name for name in GUIDED_FIELDS if getattr(self, name) is not None]) > 1:
            raise RequestError(f"{' and '.join(guided)} are given together: a text is guided by one of them.")
        if self.num_beams > 1:
            _check_beams(self)
        elif self.num_beam_groups > 1 or self.diversity_penalty:
            raise RequestError(
                f"num_beam_groups={self.num_beam_groups} and diversity_penalty={self.diversity_penalty:g} are not "
                "possible without beams: set num_beams."
            )
        elif self.length_penalty != 1 or self.early_stopping is not False:
            raise RequestError(
                f"length_penalty={self.length_penalty:g} and early_stopping={self.early_stopping!r} are for a beam "
                "search, and num_beams is 1: set num_beams, or leave them out."
            )

    def __repr__(self) -> str:
        """What is not as by default."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.repr}
        changed = (f"{name}={value!r}" for name, value in given.items() if value != getattr(_DEFAULTS, name))
        return f"SamplingParams({', '.join(changed)})"

    def __eq__(self, other):
        return self._key == other._key if isinstance(other, SamplingParams) else NotImplemented

    def __hash__(self):
        return hash(self._key)

    @property
    def guidance(self) -> tuple[str, Any] | None:
        """Which of the guided fields is given, and its value."""
        return next(((name, value) for name in GUIDED_FIELDS if (value := getattr(self, name)) is not None), None)

    @property
    def _key(self) -> tuple:
        """What tells one from another: `==` of two arrays is an array, and they have no hash."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.prompt_embeds is not None:
            values["prompt_embeds"] = (self.prompt_embeds.shape, self.prompt_embeds.tobytes())
        return tuple(values.values())


def _check_beams(params: SamplingParams) -> None:
    """Refuse what a beam search cannot do."""
    has_groups = params.num_beam_groups > 1
    problems = (
        (params.n > params.num_beams, f"n={params.n}", "a search returns num_beams sequences at most"),
        (
            params.temperature > 0,
            f"temperature={params.temperature:g}",
            "a search draws nothing, so set temperature=0",
        ),
        (params.best_of is not None, f"best_of={params.best_of}", "a search returns its n best: leave it out"),
        (params.overflow == "slide", "overflow='slide'", "beams keep their positions: use another overflow"),
        (
            params.num_beams % params.num_beam_groups,
            f"num_beam_groups={params.num_beam_groups}",
            "groups are of equal size: it must divide num_beams",
        ),
        (
            has_groups != (params.diversity_penalty > 0),
            f"num_beam_groups={params.num_beam_groups} and diversity_penalty={params.diversity_penalty:g}",
            "groups differ by their penalty: set both, or neither",
        ),
    )
    for is_given, what, why in problems:
        if is_given:
            raise RequestError(f"num_beams={params.num_beams} is not possible with {what}: {why}.")


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids that the model does not know; RequestError names the field and the id."""
    of_field = {
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words_ids": [token_id for word in params.bad_words_ids for token_id in word],
        "eos_token_id": params.eos_token_id or (),
        "logit_bias": [token_id for token_id, _ in params.logit_bias],
        "stop_token_ids": params.stop_token_ids,
        "suppress_tokens": params.suppress_tokens,
        "top_p_reset_ids": params.top_p_reset_ids or (),
    }
    for name, token_ids in of_field.items():
        if outside := [token_id for token_id in token_ids if token_id >= vocab_size]:
            raise RequestError(
                f"{name} holds token id {outside[0]}, which is outside the vocabulary: this model knows ids 0 to "
                f"{vocab_size - 1}."
            )


def num_best(count: int, vocab_size: int) -> int:
    """How many tokens `logprobs` and `prompt_logprobs` ask for, with ALL as a number."""
    return vocab_size if count == ALL else count


def resolve_bad_words(params: SamplingParams, encode: Callable[[str], list[int]]) -> SamplingParams:
    """The same params with the texts of bad_words as token ids in bad_words_ids, each with and without a space."""
    if not params.bad_words:
        return params
    texts = [space + word.lstrip() for word in params.bad_words for space in ("", " ")]
    resolved = (tuple(encode(text)) for text in texts)
    return replace(params, bad_words=None, bad_words_ids=dict.fromkeys((*params.bad_words_ids, *resolved)))


def _read_fields(instance: Any, rules: dict[str, tuple[str, Callable[[Any], Any]]]) -> None:
    """Defaults are passed over: each is what its rule would make of it, but for None."""
    problems, cls = [], type(instance)
    for name, (allowed, normalise) in rules.items():
        given = getattr(instance, name)
        if given is not None and given is getattr(cls, name, None):
            continue
        try:
            object.__setattr__(instance, name, normalise(given))
        except (TypeError, ValueError) as error:
            where = read.where_no_json(error)
            problems.append(f"{name}={reprlib.repr(given)} is not possible: it must be {allowed}{where}")
    if problems:
        raise RequestError("; ".join(problems) + ".")


def _seed(value) -> int | None:
    number = read.optional_integer(value, -1, MAX_SEED)
    return None if number == -1 else number


def _num_logprobs(value) -> int | None:
    return read.optional_integer(value, ALL)


def _repetition_detection(value) -> RepetitionDetection | None:
    if value is None or isinstance(value, RepetitionDetection):
        return value
    if not isinstance(value, Mapping):
        raise TypeError
    return RepetitionDetection(**value)


_COUNT = "a whole number from 0 (off) to 2**31 - 1"
_IDS = "a list of token ids, each a whole number from 0 to 2**31 - 1"
_LOGPROBS = "a whole number from -1 (all) to 2**31 - 1, or None"
_PENALTY = f"a number from {-MAX_PENALTY:g} to {MAX_PENALTY:g} (0 is off)"
_SHARE = ("a number above 0 and at most 1 (off)", lambda value: read.real(value, lambda number: 0 < number <= 1))
_CUTOFF = ("a number from 0 (off) to below 1", lambda value: read.real(value, lambda number: 0 <= number < 1))

_REPETITION_RULES = {
    "max_pattern_size": ("a whole number from 1 to 2**31 - 1", lambda value: read.integer(value, 1)),
    "min_count": ("a whole number from 2 to 2**31 - 1", lambda value: read.integer(value, 2)),
    "min_pattern_size": ("a whole number from 1 to 2**31 - 1", lambda value: read.integer(value, 1)),
}

_RULES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "max_tokens": ("a whole number from 1 to 2**31 - 1", lambda value: read.integer(value, 1)),
    "temperature": (
        f"0 (greedy) or a finite number, {MIN_TEMPERATURE:g} or more",
        lambda value: read.real(value, lambda number: number == 0 or MIN_TEMPERATURE <= number < math.inf),
    ),
    "top_k": ("-1 or 0 (off), or a whole number up to 2**31 - 1", lambda value: max(read.integer(value, -1), 0)),
    "top_p": _SHARE,
    "seed": ("a whole number from -1 (one is drawn) to 2**64 - 1, or None", _seed),
    "n": (f"a whole number from 1 to {MAX_SAMPLES}", lambda value: read.integer(value, 1, MAX_SAMPLES)),
    "stop": ("a text or a list of texts, none of them empty, or None", read.texts),
    "stop_token_ids": (f"{_IDS}, or None", read.token_ids),
    "ignore_eos": ("True or False", read.boolean),
    "logprobs": (_LOGPROBS, _num_logprobs),
    "logit_bias": (
        f"a dict from token ids to numbers from {-MAX_BIAS:g} to {MAX_BIAS:g} (to forbid: suppress_tokens), or None",
        lambda value: read.biases(value, MAX_BIAS),
    ),
    "repetition_penalty": (
        f"a number from {MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g} (1 is off)",
        read.between(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    ),
    "frequency_penalty": (_PENALTY, read.between(-MAX_PENALTY, MAX_PENALTY)),
    "presence_penalty": (_PENALTY, read.between(-MAX_PENALTY, MAX_PENALTY)),
    "no_repeat_ngram_size": (_COUNT, lambda value: read.integer(value, 0)),
    "bad_words": ("a text or a list of texts, each with more than white space, or None", read.words),
    "bad_words_ids": ("a list of lists of token ids, none of them empty, or None", read.token_sequences),
    "min_tokens": (_COUNT, lambda value: read.integer(value, 0)),
    "allowed_token_ids": (f"{_IDS}, and not an empty one, or None", read.some_token_ids),
    "suppress_tokens": (f"{_IDS}, or None", read.token_ids),
    "logits_processors": ("a function or a list of functions, or None", read.functions),
    "top_p_rule": (
        "'hf', 'openai' or 'fastertransformer'",
        read.one_of("hf", "openai", "fastertransformer"),
    ),
    "top_p_decay": _SHARE,
    "top_p_min": ("a number above 0 and at most 1", _SHARE[1]),
    "top_p_reset_ids": (f"a token id, or {_IDS}, and not an empty one, or None", read.one_or_more_token_ids),
    "min_p": ("a number from 0 (off) to 1", read.between(0, 1)),
    "typical_p": _SHARE,
    "epsilon_cutoff": _CUTOFF,
    "eta_cutoff": _CUTOFF,
    "best_of": (
        f"a whole number from 1 to {MAX_SAMPLES}, or None",
        lambda value: read.optional_integer(value, 1, MAX_SAMPLES),
    ),
    "num_beams": (f"a whole number from 1 to {MAX_BEAMS}", lambda value: read.integer(value, 1, MAX_BEAMS)),
    "length_penalty": (
        f"a number from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}",
        read.between(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
    ),
    "early_stopping": (
        "True, False or 'never'",
        lambda value: value if isinstance(value, bool) else read.one_of("never")(value),
    ),
    "num_beam_groups": (f"a whole number from 1 to {MAX_BEAMS}", lambda value: read.integer(value, 1, MAX_BEAMS)),
    "diversity_penalty": (
        f"a number from 0 (off) to {MAX_DIVERSITY_PENALTY:g}",
        read.between(0, MAX_DIVERSITY_PENALTY),
    ),
    "prompt_lookup_num_tokens": (_COUNT, lambda value: read.integer(value, 0)),
    "max_matching_ngram_size": ("a whole number from 1 to 2**31 - 1", lambda value: read.integer(value, 1)),
    "eos_token_id": (
        f"a token id, or {_IDS}, and not an empty one (use ignore_eos), or None",
        read.one_or_more_token_ids,
    ),
    "include_stop_str_in_output": ("True or False", read.boolean),
    "max_time": ("a finite number of seconds above 0, or None", read.seconds),
    "repetition_detection": (
        "a RepetitionDetection or a dict of its fields: max_pattern_size, 1 or more, min_count, 2 or more, and "
        "min_pattern_size, 1 to max_pattern_size; or None",
        _repetition_detection,
    ),
    "prompt_logprobs": (_LOGPROBS, _num_logprobs),
    "logprobs_mode": ("'raw' or 'processed'", read.one_of("raw", "processed")),
    "soft_prompt": ("the name of a soft prompt that the LLM was given, or None", read.name),
    "prompt_embeds": ("an array of finite numbers, (P, n_embd) with P 1 or more, or None", read.embeddings),
    "overflow": (
        "'refuse', 'clamp', 'truncate' or 'slide'",
        read.one_of("refuse", "clamp", "truncate", "slide"),
    ),
    "guided_choice": ("a list of texts, none of them empty, or None", read.alternatives),
    "guided_regex": ("a regular expression, or None", read.pattern),
    "guided_json": ("a JSON schema: a dict, or the same as JSON text, or None", read.json_schema),
    "guided_grammar": ("the text of a grammar, or None", read.pattern),
    "stride": ("a whole number from 1 to 2**31 - 1, or None", lambda value: read.optional_integer(value, 1)),
}
_DEFAULTS = SamplingParams()
