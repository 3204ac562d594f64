"""Types of values in request bodies, with their limits, and the base of all models: Strict."""

from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import TypeAliasType

from ..aliases import OURS
from ..engine.guided import MAX_CHARACTERS

# Of one request.
MAX_INT = 2**31 - 1
MAX_BIAS = 100.0  # OpenAI's
MAX_PROMPTS = 256
MAX_SAMPLES = 128
MAX_STOPS = 64
MAX_WORDS = 10_000
MAX_IDS = 1_000_000
MAX_FIELDS = 256  # that are read; more than any form knows
IGNORED = ("pad_token_id", "use_cache")  # of transformers


def _whole(value: Any) -> Any:
    """Return 16 for 16.0: JSON has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole_numbers(value: Any) -> Any:
    return [*map(_whole, value)] if isinstance(value, list) and float in set(map(type, value)) else value


def _to_the_first_error(given: Any) -> Any:
    """Return the first bad bias alone: pydantic has fail_fast for lists, not for dicts."""
    for key, bias in given.items() if isinstance(given, dict) else ():
        if len(key) > 1000 or type(bias) not in (int, float) or not abs(bias) <= MAX_BIAS:
            return {key: bias}
    return given


def items(most: int, least: int | None = None) -> Any:
    return Field(min_length=least, max_length=most, fail_fast=True)


Whole = BeforeValidator(_whole)  # stands after the limits, or the schema would lack them
# Named types have a schema each, into which the app writes the limits of its model.
TokenId = TypeAliasType("TokenId", Annotated[int, Field(ge=0, le=MAX_INT)])
NumLogprobs = TypeAliasType("NumLogprobs", Annotated[int, Field(ge=0, le=MAX_INT), Whole])
ModelName = TypeAliasType("ModelName", Annotated[str, Field(min_length=1)])

Positive = Annotated[int, Field(ge=1, le=MAX_INT), Whole]
Count = Annotated[int, Field(ge=0, le=MAX_INT), Whole]
Position = Annotated[int, Field(ge=-MAX_INT, le=MAX_INT), Whole]
Positions = Annotated[list[Position], items(2**16)]
Biases = Annotated[
    dict[Annotated[str, Field(max_length=1000)], Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]],
    Field(max_length=MAX_WORDS),
    BeforeValidator(_to_the_first_error),
]
Text = Annotated[str, Field(min_length=1)]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]
Schema = dict[str, Any] | Pattern
TokenIds = Annotated[list[TokenId], items(MAX_IDS, 1), BeforeValidator(whole_numbers)]
Texts = Annotated[list[Text], items(MAX_PROMPTS, 1)]
IdLists = Annotated[list[TokenIds], items(MAX_PROMPTS, 1)]
Prompts = str | TokenIds | Annotated[list[str], items(MAX_PROMPTS, 1)] | IdLists
Stops = Text | Annotated[list[Text], items(MAX_STOPS)]
Messages = items(10_000, 1)
Pooling = Literal["last", "mean", "sum"]


class Strict(BaseModel):
    """Refuses unknown fields, NaN, and values of another type: "3" is no number and 1 is not true."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    takes_adapter: ClassVar[bool] = False  # `model` may name one: the reply is the adapter's, or the same

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, given: Any) -> Any:
        """Drop all unknown fields but one: 300 000 would take seconds."""
        if not isinstance(given, dict) or len(given) <= MAX_FIELDS:
            return given
        known = {*cls.fields_by_name(), *cls.model_fields, *OURS, *IGNORED}
        unknown = next(name for name in given if name not in known)
        return {name: given[name] for name in (*known, unknown) if name in given}

    @classmethod
    def fields_by_name(cls) -> dict[str, Any]:
        return {field.alias or name: field for name, field in cls.model_fields.items()}

    @classmethod
    @cache
    def logprobs_fields(cls) -> list[str]:
        """Return the names of the fields that `--max-logprobs` bounds: all of type NumLogprobs."""
        return [name for name, field in cls.model_fields.items() if NumLogprobs in get_args(field.annotation)]

    def name_of(self, field: str) -> str | None:
        """Return this request's name of an engine's field; None without one."""
        return field if field.partition(".")[0] in type(self).model_fields else None
