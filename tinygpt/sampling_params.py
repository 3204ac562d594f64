"""SamplingParams: the fields of a request, each declared on one line.

A line gives the field's name, type, default, rule (`fields.py`), and the flag's metavar, help text and group. The
checks, `help(SamplingParams)`, `cli/flags.py` and `server/protocol.py` derive from it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from . import fields as rules
from .errors import RequestError, invalid
from .fields import FieldRule, option

ALL = -1  # as a number of log probabilities
GUIDED_FIELDS = ("guided_choice", "guided_regex", "guided_json", "guided_grammar")
BEAM_FIELDS = ("length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty")
BEAM_FIELDS += ("beam_search_diversity_rate",)

# Groups of --help.
END = "the end of a sample"
SCORES = "tokens to favor or avoid, sampling or not"
GUIDED = "structured output (one of these; pip install 'tinygpt[guided]')"
WARPERS = "more ways to leave tokens out, with --temperature above 0"
BEAMS = "beam search"
DRAFTS = "speculative decoding, for fewer steps with the same result"
POSITIONS = "more tokens than positions"
LOGS = "probabilities, in JSON records"
INPUTS = "vectors in front of the prompt"  # no flags
INSIDE = "activations"  # no flags
TEXTS = "texts"  # no flags
GROUPS = ("sampling", END, SCORES, GUIDED, WARPERS, BEAMS, DRAFTS, POSITIONS, LOGS)  # the order of --help

# f(prompt_token_ids, new_token_ids, scores (V,) float32) -> scores (V,)
LogitsProcessor = Callable[[list[int], list[int], Any], Any]

TopPRule = Literal["hf", "openai", "fastertransformer"]
PresenceRule = Literal["openai", "fastertransformer"]
LogprobsMode = Literal["raw", "processed"]
Overflow = Literal["refuse", "clamp", "truncate", "slide"]


@rules.documented
@dataclass(frozen=True)
class RepetitionDetection:
    """A rule for samples that loop: their last tokens are one pattern, `min_count` times in a row."""

    max_pattern_size: int = option(MISSING, rules.POSITIVE, None, "most tokens of a pattern")
    min_count: int = option(MISSING, rules.integer(2), None, "how often it occurs")
    min_pattern_size: int = option(1, rules.POSITIVE, None, "fewest tokens of a pattern")

    def __post_init__(self):
        rules.read_fields(self)
        if self.min_pattern_size > self.max_pattern_size:
            allowed = f"at most max_pattern_size, which is {self.max_pattern_size}"
            raise invalid("min_pattern_size", self.min_pattern_size, allowed)


def repetition(text: str) -> dict[str, int]:
    size, count, least = [*map(int, text.split(",")), 1][:3]
    return {"max_pattern_size": size, "min_count": count, "min_pattern_size": least}


REPETITION = rules.optional(
    FieldRule(
        "a RepetitionDetection or a dict of its fields: max_pattern_size, 1 or more, min_count, 2 or more, and "
        "min_pattern_size, 1 to max_pattern_size",
        lambda value: value if isinstance(value, RepetitionDetection) else RepetitionDetection(**value),
        repetition,
    )
)


def _edits(value: Any) -> tuple:
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return ()
    from .look.edits import Edit  # not needed for --help

    edits = (value,) if isinstance(value, Edit) else tuple(value)
    rules.need(all(isinstance(edit, Edit) for edit in edits))
    return edits


EDITS = FieldRule("an Edit or a list of them, or None", _edits)


@rules.documented
@dataclass(frozen=True, repr=False)
class SamplingParams:
    """How to choose the tokens of a request. Raise RequestError, a ValueError, for a wrong value.

    Scores change in this order before a token is sampled, greedily or not: logit_bias, repetition_penalty,
    frequency_penalty, presence_penalty, dry_multiplier, no_repeat_ngram_size, bad_words, min_tokens,
    allowed_token_ids, suppress_tokens, logits_processors, and the tokens that may not come next in a guided text. With
    temperature above 0 tokens are then removed in this order: top_n_sigma, before the division by the temperature;
    top_k, top_p, min_p, typical_p, epsilon_cutoff, eta_cutoff, xtc_probability. (llama.cpp divides last.)

    Notes:
    - Greedy samples are equal: one is computed and returned n times.
    - A stop text that begins in the prompt does not count.
    - bad_words count with and without a space before them, but not the end-of-text token alone, as in Hugging Face's.
    - Before min_tokens, the end-of-text token (even with ignore_eos) and stop_token_ids may not come, and no stop text
      or loop ends the sample.
    - best_of ranks by the mean log probability of the tokens, as logprobs_mode has it; the best comes first.
    - A beam search returns its n best sequences by log probability over length**length_penalty. early_stopping: True
      ends it with num_beams ended sequences; False, when the best beam would not be among them if it ended now;
      "never", when it cannot come among them any more. diversity_penalty is taken off a token's score for each beam of
      an earlier group that chose it. beam_search_diversity_rate times a token's rank (modulo num_beams) among its own
      beam's is added where beams are compared, and to no score.
    - top_p_rule: "hf" keeps the token that crosses p; "openai" (its GPT-2 code) drops it unless it is the first;
      "fastertransformer" keeps the part of its probability that lies within p; its p of 0 is off next to top_k, and
      greedy without. presence_penalty_rule "fastertransformer": the penalty counts the prompt's tokens too, comes off
      after the temperature, and excludes the other two, as in its kernels. top_p_decay, top_p_min and
      top_p_reset_ids: Lee et al., "Factuality Enhanced Language Models" (2022). typical_p: Meister et al. (2022).
      eta_cutoff: Hewitt et al. (2022).
    - DRY (dry_multiplier) takes dry_multiplier * dry_base**(n - dry_allowed_length) off the score of a token that would
      repeat n earlier tokens and the one after them, within the last dry_penalty_last_n tokens, prompt included, and
      since the last breaker. XTC: in a share xtc_probability of the draws, by the seed, all tokens that reach
      xtc_threshold are removed but the least probable of them. Both, and top_n_sigma, are llama.cpp's.
    - If max_time ends a request while its prompt is read, prompt_logprobs has the first tokens alone.
    - A guided text may end (with EOS or stop_token_ids) exactly if its grammar allows it, and ends if nothing else may
      come, whatever min_tokens and ignore_eos say; or by max_tokens, max_time and stop. guided_regex has Rust's syntax
      without look-around; guided_grammar Lark's or llama.cpp's (GBNF).
    """

    max_tokens: int = option(16, rules.integer(0), "N", "largest number of new tokens; 0 reads the prompt")
    temperature: float = option(0.0, rules.TEMPERATURE, "X", "0 is greedy, 1 the model's own distribution")
    top_k: int = option(
        0, rules.TOP_K, "N", "keep the N most probable tokens and those tied with the last; 0 is off"
    )
    top_p: float = option(
        1.0, rules.TOP_P, "P", "of those, keep the most probable that reach probability P; 1 is off"
    )
    seed: int | None = option(
        None, rules.SEED, "N", "the same seed gives the same text (default: drawn, and reported)"
    )
    n: int = option(1, rules.SAMPLES, "N", "samples for each prompt")
    stop: str | Iterable[str] | None = option(
        None, rules.TEXTS, "TEXT", "a text to end at, which is cut off", END
    )
    stop_token_ids: Iterable[int] | None = option(
        None, rules.IDS, "ID,ID", "tokens to end at, their text cut off", END
    )
    ignore_eos: bool = option(False, rules.BOOLEAN, None, "go on past the end-of-text token", END)
    logprobs: int | None = option(
        None,
        rules.LOGPROBS,
        "N",
        "of each new token, and of the N most probable tokens there; -1 is all",
        LOGS,
    )
    logit_bias: Mapping[int, float] | None = option(
        None, rules.biases(100), "ID=X", "add X to a token's score", SCORES
    )
    repetition_penalty: float = option(
        1.0,
        rules.between(1e-3, 1e3),
        "X",
        "divide the scores of tokens in the prompt or text by X; 1 is off",
        SCORES,
    )
    frequency_penalty: float = option(
        0.0, rules.PENALTY, "X", "subtract X each time a token occurs in the text", SCORES
    )
    presence_penalty: float = option(
        0.0, rules.PENALTY, "X", "subtract X if a token occurs in the text", SCORES
    )
    presence_penalty_rule: PresenceRule = option(
        "openai",
        rules.one_of(PresenceRule),
        "RULE",
        "what it is subtracted for: openai or fastertransformer",
        SCORES,
    )
    no_repeat_ngram_size: int = option(
        0, rules.COUNT, "N", "no run of N tokens occurs twice; 0 is off", SCORES
    )
    dry_multiplier: float = option(
        0.0,
        rules.between(0, 1e3, " (0 is off)"),
        "X",
        "DRY: the penalty of a token that goes on with a repeat",
        SCORES,
    )
    dry_base: float = option(
        1.75, rules.between(1, 1e3), "X", "multiply it by X for each more token repeated", SCORES
    )
    dry_allowed_length: int = option(
        2, rules.integer(0), "N", "repeats of fewer tokens have no penalty", SCORES
    )
    dry_penalty_last_n: int = option(
        64, rules.LAST_N, "N", "look for repeats in the last N tokens; -1 is all", SCORES
    )
    dry_sequence_breakers: str | Iterable[str] | None = option(
        None,
        rules.BREAKERS,
        "TEXT",
        f"a text that ends a repeat; none: no text (default: {rules.DRY_BREAKERS})",
        SCORES,
    )
    bad_words: str | Iterable[str] | None = option(
        None, rules.WORDS, "TEXT", "a text that may not occur", SCORES
    )
    bad_words_ids: Iterable[Iterable[int]] | None = option(
        None, rules.ID_LISTS, "ID,ID", "tokens that may not occur in a row", SCORES
    )
    min_tokens: int = option(0, rules.COUNT, "N", "no end before N tokens", END)
    allowed_token_ids: Iterable[int] | None = option(
        None, rules.SOME_IDS, "ID,ID", "only these may occur", SCORES
    )
    suppress_tokens: Iterable[int] | None = option(
        None, rules.IDS, "ID,ID", "these tokens may not occur", SCORES
    )
    logits_processors: LogitsProcessor | Iterable[LogitsProcessor] | None = option(
        None,
        rules.FUNCTIONS,
        None,
        "f(prompt_token_ids, new_token_ids, scores) -> scores, (V,) float32 both",
        SCORES,
    )
    top_p_rule: TopPRule = option(
        "hf",
        rules.one_of(TopPRule),
        "RULE",
        "for the token that crosses top_p: hf, openai or fastertransformer",
        WARPERS,
    )
    top_p_decay: float = option(
        1.0, rules.SHARE, "X", "multiply top_p by X after each token; 1 is off", WARPERS
    )
    top_p_min: float = option(1e-6, rules.SHARE, "P", "top_p_decay stops at P", WARPERS)
    top_p_reset_ids: int | Iterable[int] | None = option(
        None, rules.ID_OR_IDS, "ID,ID", "one of these tokens resets top_p to its first value", WARPERS
    )
    min_p: float = option(
        0.0,
        rules.between(0, 1),
        "P",
        "leave out what is below P times the highest probability; 0 is off",
        WARPERS,
    )
    typical_p: float = option(
        1.0, rules.SHARE, "P", "keep the most typical tokens that reach P; 1 is off", WARPERS
    )
    epsilon_cutoff: float = option(
        0.0, rules.CUTOFF, "P", "leave out what is less probable than P; 0 is off", WARPERS
    )
    eta_cutoff: float = option(
        0.0, rules.CUTOFF, "P", "as epsilon_cutoff, lower if the distribution is flat; 0 is off", WARPERS
    )
    top_n_sigma: float = option(
        -1.0,
        rules.SIGMAS,
        "N",
        "keep tokens within N standard deviations of the highest score; -1 is off",
        WARPERS,
    )
    xtc_probability: float = option(
        0.0,
        rules.between(0, 1),
        "P",
        "XTC: of the most probable tokens keep the last, with probability P",
        WARPERS,
    )
    xtc_threshold: float = option(
        0.1, rules.between(0, 1), "P", "those of at least P; above 0.5 is off", WARPERS
    )
    best_of: int | None = option(
        None,
        rules.optional(rules.SAMPLES),
        "N",
        "samples to make; the n most probable per token are returned (default: n)",
    )
    num_beams: int = option(1, rules.BEAM_COUNT, "N", "beams; 1 is off, and more take temperature 0", BEAMS)
    length_penalty: float = option(
        1.0, rules.between(-10, 10), "X", "above 0 favors long texts, below 0 short", BEAMS
    )
    early_stopping: bool | Literal["never"] = option(
        False, rules.EARLY_STOPPING, "WHEN", "when to end: true, false or never (default: false)", BEAMS
    )
    num_beam_groups: int = option(1, rules.BEAM_COUNT, "N", "groups that avoid one another's tokens", BEAMS)
    diversity_penalty: float = option(
        0.0,
        rules.between(0, 1e6, " (0 is off)"),
        "X",
        "subtract X from tokens that earlier groups chose",
        BEAMS,
    )
    beam_search_diversity_rate: float = option(
        0.0,
        rules.between(-1e6, 1e6, " (0 is off)"),
        "X",
        "FasterTransformer's: favors tokens of a low rank",
        BEAMS,
    )
    prompt_lookup_num_tokens: int = option(
        0, rules.COUNT, "N", "draft N tokens of earlier text; 0 is off", DRAFTS
    )
    max_matching_ngram_size: int = option(
        2, rules.POSITIVE, "N", "most tokens before them that must match", DRAFTS
    )
    eos_token_id: int | Iterable[int] | None = option(
        None,
        rules.ID_OR_IDS,
        "ID,ID",
        "end-of-text tokens in place of the model's (default: the model's)",
        END,
    )
    include_stop_str_in_output: bool = option(
        False, rules.BOOLEAN, None, "keep the stop text, or stop token's", END
    )
    skip_special_tokens: bool = option(
        True, rules.BOOLEAN, None, "leave special tokens out of the text", TEXTS
    )
    max_time: float | None = option(None, rules.SECONDS, "SECONDS", "end after this many seconds", END)
    repetition_detection: RepetitionDetection | Mapping[str, int] | None = option(
        None,
        REPETITION,
        "SIZE,COUNT[,MIN]",
        "end when the last tokens are one pattern of at most SIZE tokens (and MIN or more), COUNT times in a row",
        END,
    )
    prompt_logprobs: int | None = option(None, rules.LOGPROBS, "N", "of each token of the prompt", LOGS)
    logprobs_mode: LogprobsMode = option(
        "raw",
        rules.one_of(LogprobsMode),
        "MODE",
        "raw: the model's; processed: those of the tokens' draw",
        LOGS,
    )
    overflow: Overflow = option(
        "refuse",
        rules.one_of(Overflow),
        "HOW",
        "what to do: refuse, clamp (fewer new tokens), truncate (the prompt's beginning) or slide (without end: "
        "the oldest tokens are dropped, and the rest is read again)",
        POSITIONS,
    )
    stride: int | None = option(
        None,
        rules.optional(rules.POSITIVE),
        "N",
        "tokens to drop at a time (default: half the positions)",
        POSITIONS,
    )
    soft_prompt: str | None = option(None, rules.NAME, None, "one of the LLM's soft prompts", INPUTS)
    lora_request: str | None = option(
        None, rules.ADAPTER, "NAME", "the adapter that runs it: one of lora_modules"
    )
    prompt_embeds: Any = option(
        None, rules.EMBEDDINGS, None, "embeddings (P, n_embd) of tokens without an id", INPUTS, repr=False
    )
    capture: str | Iterable[str] | None = option(
        None,
        rules.TEXTS,
        None,
        'activations to return: names as "blocks.0.hook_resid_pre", with *, or "z"',
        INSIDE,
    )
    edits: Any = option(None, EDITS, None, "changes of activations", INSIDE, repr=False)
    guided_choice: Iterable[str] | None = option(
        None, rules.ALTERNATIVES, "TEXT", "exactly this text; given several times, one of them", GUIDED
    )
    guided_regex: str | None = option(
        None, rules.REGEX, "REGEX", "what this whole regular expression matches", GUIDED
    )
    guided_json: str | Mapping[str, Any] | type[Any] | None = option(
        None,
        rules.JSON_SCHEMA,
        "SCHEMA",
        'JSON of this schema: \'{"type": "object"}\' or "$(cat schema.json)"',
        GUIDED,
    )
    guided_grammar: str | None = option(
        None, rules.GRAMMAR, "GRAMMAR", "this grammar, Lark's or GBNF", GUIDED
    )

    def __post_init__(self):
        rules.read_fields(self)
        if self.top_p == 0:
            # With top_k 1, all programs choose the most probable token.
            is_known = self.top_p_rule == "fastertransformer" or self.top_k == 1
            self._need("top_p", is_known, rules.TOP_P.allowed)
            # TopKSamplingLayer.cu: k above 0 and p 0 is k alone, both 0 is k 1.
            object.__setattr__(self, "top_p", 1.0)
            object.__setattr__(self, "temperature", self.temperature if self.top_k else 0.0)
        if self.presence_penalty_rule == "fastertransformer":
            is_alone = (self.repetition_penalty, self.frequency_penalty, self.num_beams) == (1, 0, 1)
            self._need("presence_penalty_rule", is_alone, "'openai' with another penalty, or with num_beams")
        has_enough = self.best_of is None or self.best_of >= self.n
        self._need("best_of", has_enough, f"at least n, which is {self.n}")
        allowed = f"at most max_tokens, which is {self.max_tokens}"
        self._need("min_tokens", self.min_tokens <= self.max_tokens, allowed)
        if self.soft_prompt is not None and self.prompt_embeds is not None:
            reason = "and prompt_embeds are both given: give one of them."
            raise RequestError(reason, "soft_prompt", self.soft_prompt)
        if self.stride is not None and self.overflow != "slide":
            reason = "is for the overflow 'slide': set that too, or leave it out."
            raise RequestError(reason, "stride", self.stride)
        guided = [name for name in GUIDED_FIELDS if getattr(self, name) is not None]
        if len(guided) > 1:
            reason = f"and {guided[1]} are given together: a text is guided by one of them."
            raise RequestError(reason, guided[0])
        if self.capture or self.edits:
            allowed = "left out with capture or edits: they see the base model"
            self._need("lora_request", self.lora_request is None, allowed)
            self._need("num_beams", self.num_beams == 1, "1 with capture or edits")
            self._need("overflow", self.overflow != "slide", "another one with capture or edits, by position")
            if self.soft_prompt is not None or self.prompt_embeds is not None:
                raise RequestError("cannot be given with a soft prompt or prompt_embeds.", "capture or edits")
        if self.num_beams > 1:
            self._need("max_tokens", self.max_tokens > 0, "above 0 with num_beams")
            self._check_beams()
            return
        for name in BEAM_FIELDS:
            # A length penalty of 0 is FasterTransformer's default.
            if (value := getattr(self, name)) not in (SAMPLING_FIELDS[name].default, 0):
                reason = f"is {value!r} and num_beams is 1: set num_beams, or leave it out."
                raise RequestError(reason, name, value)

    def _need(self, name: str, is_right: bool, allowed: str) -> None:
        if not is_right:
            raise invalid(name, getattr(self, name), allowed)

    def _check_beams(self) -> None:
        beams = self.num_beams
        groups = self.num_beam_groups
        self._need("n", self.n <= beams, f"at most num_beams, which is {beams}")
        self._need("temperature", self.temperature == 0, "0 with num_beams: a beam search draws nothing")
        allowed = "left out with num_beams: a beam search returns its n best"
        self._need("best_of", self.best_of is None, allowed)
        allowed = "another one with num_beams: beams keep their positions"
        self._need("overflow", self.overflow != "slide", allowed)
        self._need("num_beam_groups", beams % groups == 0, f"a divisor of num_beams, which is {beams}")
        allowed = f"above 0 exactly if num_beam_groups, which is {groups}, is above 1"
        self._need("diversity_penalty", (groups > 1) == (self.diversity_penalty > 0), allowed)
        has_no_rate = groups == 1 or not self.beam_search_diversity_rate
        self._need("beam_search_diversity_rate", has_no_rate, "0 with groups")

    def __repr__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.repr}
        changed = (f"{name}={value!r}" for name, value in shown.items() if value != getattr(_DEFAULTS, name))
        return f"SamplingParams({', '.join(changed)})"

    def __eq__(self, other):
        return self._key == other._key if isinstance(other, SamplingParams) else NotImplemented

    def __hash__(self):
        return hash(self._key)

    @property
    def num_samples(self) -> int:
        """The samples that are made, of which n are returned."""
        return self.best_of or self.n

    @property
    def guidance(self) -> tuple[str, Any] | None:
        """The name and value of the guided field that is given."""
        guides = ((name, getattr(self, name)) for name in GUIDED_FIELDS)
        return next((pair for pair in guides if pair[1] is not None), None)

    @property
    def _key(self) -> tuple:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.prompt_embeds is not None:  # arrays have no hash, and `==` of two is an array
            values["prompt_embeds"] = (self.prompt_embeds.shape, self.prompt_embeds.tobytes())
        return tuple(values.values())


SAMPLING_FIELDS = {field.name: field for field in fields(SamplingParams)}
_DEFAULTS = SamplingParams()


def num_best(count: int, vocab_size: int) -> int:
    """Return how many tokens `logprobs` or `prompt_logprobs` asks for, with ALL as a number."""
    return vocab_size if count == ALL else count
