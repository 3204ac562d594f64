"""Rules of fields, of params, LLMArgs, ServerConfig, edits, sessions: values, words, flags."""

import functools
import json
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, TypeVar, get_args

from .errors import RequestError, invalid, suggest

MAX_COUNT = 2**31 - 1
MAX_SEED = 2**64 - 1
MAX_SAMPLES = 10_000  # of one prompt: all stay in memory until the last is finished
MAX_BEAMS = 1000  # each looks at as many candidates again
# Logits are float32: divided by less than this, they overflow to infinity.
MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class FieldRule:
    """The values that a field takes.

    allowed: completes "must be".
    read: returns the value as the engine sees it, or raises TypeError or ValueError.
    parse: converts the text of a flag; None is a flag without a value.
    repeats: whether the flag may be given several times. nargs, choices: argparse's.
    """

    allowed: str
    read: Callable[[Any], Any]
    parse: Callable[[str], Any] | None = str
    repeats: bool = False
    nargs: str | None = None
    choices: tuple[str, ...] | None = None


def option(
    default: Any, rule: FieldRule, metavar: str | None, text: str, group: str = "sampling", **more: Any
) -> Any:
    return field(
        default=default, metadata={"rule": rule, "metavar": metavar, "help": text, "group": group}, **more
    )


def read_field(name: str, value: Any, rule: FieldRule) -> Any:
    """Return the value as the engine sees it. Raise RequestError."""
    try:
        return rule.read(value)
    except (TypeError, ValueError, OverflowError):
        raise invalid(name, value, rule.allowed) from None


def own_names(keywords: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return keywords, of which those of other programs have our `names`. Raise RequestError if two name one thing."""
    if keywords.keys() <= {*names}:
        return keywords
    from .aliases import renamed

    return renamed(keywords, names)


Class = TypeVar("Class", bound=type)


def documented(cls: Class) -> Class:
    """Add the fields to the docstring, accept other programs' names, and refuse unknown ones with RequestError."""
    init = cls.__init__
    names = [f.name for f in fields(cls)]
    cls.__doc__ += "".join(
        f"\n    {f.name}: {f.metadata['help']} ({f.metadata['rule'].allowed})." for f in fields(cls)
    )

    @functools.wraps(init)
    def __init__(self, /, *args, **keywords):
        keywords = own_names(keywords, names)
        for name in keywords:
            if name not in names:
                hint = suggest(name, names) or "; help(SamplingParams) has all names."
                raise RequestError(f"unknown sampling field {name!r}{hint}", field=None, value=name)
        init(self, *args, **keywords)

    cls.__init__ = __init__
    return cls


def read_fields(instance: Any) -> None:
    """Replace the values of a frozen dataclass of options by those that the engine sees. Raise RequestError."""
    for f in fields(instance):
        value = getattr(instance, f.name)
        if value is None or value is not f.default:  # another default is valid as it is
            object.__setattr__(instance, f.name, read_field(f.name, value, f.metadata["rule"]))


def need(is_right: bool) -> None:
    """Raise ValueError, for `read_field`, unless a value is right."""
    if not is_right:
        raise ValueError


def as_integer(value: Any, low: int, high: int = MAX_COUNT) -> int:
    need(not isinstance(value, bool))  # True == 1 would be taken for a count
    number = operator.index(value)
    need(low <= number <= high)
    return number


def as_texts(value: Any) -> tuple[str, ...]:
    texts = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    need(all(isinstance(text, str) and text for text in texts))
    return texts


def as_ids(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(as_integer(token_id, 0) for token_id in value)


def as_unicode(value: Any) -> str:
    need(isinstance(value, str) and value != "")
    value.encode("utf-8")  # UnicodeEncodeError, a ValueError, for half a character
    return value


def token_ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def integer(low: int, high: int = MAX_COUNT, note: str = "") -> FieldRule:
    top = {MAX_COUNT: "2**31 - 1", 2**64 - 1: "2**64 - 1"}.get(high, high)
    return FieldRule(
        f"a whole number from {low} to {top}{note}", lambda value: as_integer(value, low, high), int
    )


def number(is_allowed: Callable[[float], bool], allowed: str) -> FieldRule:
    def read(value: Any) -> float:
        need(isinstance(value, Real) and not isinstance(value, bool))
        as_float = float(value)
        need(is_allowed(as_float))  # false for NaN
        return as_float

    return FieldRule(allowed, read, float)


def between(low: float, high: float, note: str = "") -> FieldRule:
    return number(lambda x: low <= x <= high, f"a number from {low:g} to {high:g}{note}")


def one_of(literal: Any) -> FieldRule:
    """literal: a Literal of the names."""
    *names, last = get_args(literal)

    def read(value: Any) -> str:
        need(isinstance(value, str) and value in (*names, last))
        return value

    return FieldRule(f"{', '.join(map(repr, names))} or {last!r}", read, str.lower)


def optional(rule: FieldRule) -> FieldRule:
    return replace(
        rule,
        allowed=f"{rule.allowed}, or None",
        read=lambda value: None if value is None else rule.read(value),
    )


def _boolean(value: Any) -> bool:
    need(isinstance(value, bool))
    return value


def _words(value: Any) -> tuple[str, ...]:
    words = as_texts(value)
    need(all(map(str.strip, words)))
    return words


def _some(values: tuple) -> tuple:
    need(values != ())
    return values


def _id_or_ids(value: Any) -> tuple[int, ...]:
    return _some(as_ids(value if hasattr(value, "__iter__") else (value,)))


def _id_lists(value: Any) -> tuple[tuple[int, ...], ...]:
    return () if value is None else tuple(_some(as_ids(ids)) for ids in value)


def token_id_of(key: Any) -> Any:
    """Return the token id that a key of JSON or of Arrow is the text of, or the key: int() refuses 5000 digits."""
    is_id = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 20
    return int(key) if is_id else key


def biases(limit: float) -> FieldRule:
    """A dict from token ids to numbers, or its pairs; kept as pairs, which can be hashed."""
    rule = between(-limit, limit)

    def read(value: Any) -> tuple[tuple[int, float], ...]:
        pairs = dict(() if value is None else value if isinstance(value, Mapping) else tuple(value))
        return tuple((as_integer(token_id, 0), rule.read(added)) for token_id, added in pairs.items())

    def bias(text: str) -> tuple[int, float]:  # argparse tells its name
        token_id, _, number_text = text.partition("=")
        return int(token_id), float(number_text)

    allowed = (
        f"a dict from token ids to numbers from {-limit:g} to {limit:g} (to forbid: suppress_tokens), or None"
    )
    return FieldRule(allowed, read, bias, repeats=True)


def _embeddings(value: Any) -> Any:
    import numpy as np  # not needed for --help

    array = np.array(value, np.float32)  # (P, C), a copy
    need(array.ndim == 2 and array.size > 0 and np.isfinite(array).all())
    array.flags.writeable = False
    return array


def _functions(value: Any) -> tuple[Callable, ...]:
    functions = () if value is None else (value,) if callable(value) else tuple(value)
    need(all(map(callable, functions)))
    return functions


def _alternatives(value: Any) -> tuple[str, ...]:
    need(not isinstance(value, str))  # its letters are not meant
    return _some(tuple(map(as_unicode, value)))


def _json_schema(value: Any) -> str:
    """Read a dict, its JSON text, or a class such as pydantic's, as text."""
    try:
        value = value.model_json_schema() if hasattr(value, "model_json_schema") else value
        schema = json.loads(value) if isinstance(value, str) else value
        need(isinstance(schema, Mapping))
        return as_unicode(json.dumps(dict(schema), ensure_ascii=False, allow_nan=False))
    except Exception as error:  # RecursionError, or pydantic's own of a class that no schema describes
        raise ValueError from error


_IDS = "a list of token ids, each a whole number from 0 to 2**31 - 1"
COUNT = integer(0, note=" (0 is off)")
POSITIVE = integer(1)
SHARE = number(lambda x: 0 < x <= 1, "a number above 0 and at most 1")
CUTOFF = number(lambda x: 0 <= x < 1, "a number from 0 (off) to below 1")
SECONDS = optional(number(lambda x: 0 < x < math.inf, "a finite number of seconds above 0"))
LOGPROBS = optional(integer(-1, note=" (-1 is all)"))
BOOLEAN = FieldRule("True or False", _boolean, None)
TEXTS = FieldRule("a text or a list of texts, none of them empty, or None", as_texts, repeats=True)
WORDS = FieldRule("a text or a list of texts, each with more than white space, or None", _words, repeats=True)
IDS = FieldRule(f"{_IDS}, or None", as_ids, token_ids)
SOME_IDS = optional(FieldRule(f"{_IDS}, and not an empty one", lambda value: _some(as_ids(value)), token_ids))
ID_OR_IDS = optional(FieldRule(f"a token id, or {_IDS}, and not an empty one", _id_or_ids, token_ids))
ID_LISTS = FieldRule(
    "a list of lists of token ids, none of them empty, or None", _id_lists, token_ids, repeats=True
)
NAME = optional(FieldRule("the name of a soft prompt that the LLM was given", as_unicode))
ADAPTER = optional(FieldRule("the name of one of the LLM's lora_modules", as_unicode))
EMBEDDINGS = optional(FieldRule("an array of finite numbers, (P, n_embd) with P 1 or more", _embeddings))
FUNCTIONS = FieldRule("a function or a list of functions, or None", _functions)
ALTERNATIVES = optional(FieldRule("a list of texts, none of them empty", _alternatives, repeats=True))
REGEX = optional(FieldRule("a regular expression", as_unicode))
GRAMMAR = optional(FieldRule("the text of a grammar", as_unicode))
JSON_SCHEMA = optional(FieldRule("a JSON schema: a dict, or the same as JSON text", _json_schema))
EARLY_STOPPING = FieldRule(
    "True, False or 'never'",
    lambda value: value if value == "never" else _boolean(value),
    lambda text: {"true": True, "false": False}.get(text.lower(), text),
)


def _breakers(value: Any) -> tuple[str, ...]:
    texts = DRY_BREAKERS if value is None else as_texts(value)
    return () if texts == ("none",) else texts  # llama.cpp's word


def _seed(value: Any) -> int | None:
    seed = as_integer(value, -1, MAX_SEED)
    return None if seed == -1 else seed


TEMPERATURE = number(
    lambda x: x == 0 or MIN_TEMPERATURE <= x < math.inf,
    f"0 (greedy) or a finite number, {MIN_TEMPERATURE:g} or more",
)
TOP_K = FieldRule(
    "-1 or 0 (off), or a whole number up to 2**31 - 1", lambda value: max(as_integer(value, -1), 0), int
)
SEED = optional(FieldRule("a whole number from -1 (one is drawn) to 2**64 - 1", _seed, int))
SAMPLES = integer(1, MAX_SAMPLES)
TENSOR_SIZE = integer(1, 4)  # a CPU's kernels sum four segments of K
PIPELINE_SIZE = integer(1, 1024)
BEAM_COUNT = integer(1, MAX_BEAMS)
PENALTY = between(-2, 2, " (0 is off)")  # OpenAI's limit
SIGMAS = number(lambda x: -1 <= x < math.inf, "-1 or 0 (off), or a finite number above it")
TOP_P = number(lambda x: 0 <= x <= 1, SHARE.allowed)  # 0 is FasterTransformer's
DRY_BREAKERS = ("\n", ":", '"', "*")
LAST_N = integer(-1, note=" (-1 is all, 0 is off)")
BREAKERS = FieldRule(
    "a text or a list of texts, none of them empty, or None (the default)", _breakers, repeats=True
)
