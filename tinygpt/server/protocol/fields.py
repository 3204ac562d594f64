"""Types of fields, each with its limits, which /openapi.json shows too.

A field that may be null is as if it were not there. JSON has one kind of number, so that 16.0 is a whole number in it:
`whole` stands behind the limits, or pydantic would leave them out of the schema.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import TypeAliasType

MAX_INT = 2**31 - 1
MAX_BIAS = 100
MAX_PROMPTS = 256  # of one request
MAX_TOKENS = 1_000_000  # of one list


class Model(BaseModel):
    """What a request or a reply looks like. pydantic builds what checks and writes it when it is first needed, or in
    `build_models`: for all of them that is a tenth of the time that a server may take to start."""

    model_config = ConfigDict(defer_build=True)


def build_models() -> Iterator[None]:
    """Build those that are not yet, one at each turn. In one thread alone: not every pydantic has a lock for it."""
    models: list[type[Model]] = [Model]
    while models:
        model = models.pop()
        models += model.__subclasses__()
        if model.model_rebuild():
            yield


class Strict(Model):
    """Refuses unknown fields, NaN, and values of another type: "3" is no number and 1 is not true.

    All errors but the first are of no use, and a body of megabytes has room for a million: of several unknown fields
    the first alone is looked at, and lists have `fail_fast`.
    """

    IS_LIBRARYS: ClassVar[bool] = False  # whether refusals are in the library's words
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def one_unknown_field(cls, given: Any) -> Any:
        if not isinstance(given, dict) or len(given) <= len(cls.model_fields):
            return given
        names = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(name for name in given if name not in names)
        return {name: value for name, value in given.items() if name in names or name == unknown}

    def name_of(self, field: str) -> str | None:
        """What this request calls what the engine calls `field`; None: it has no such field."""
        return field if field.partition(".")[0] in type(self).model_fields else None


def whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole_numbers(value: Any) -> Any:
    """Of a list, which is looked through at once: a call for each of a million ids would take a second."""
    return [*map(whole, value)] if isinstance(value, list) and float in set(map(type, value)) else value


_Whole = BeforeValidator(whole)
_WholeNumbers = BeforeValidator(whole_numbers)
Positive = Annotated[int, Field(ge=1, le=MAX_INT), _Whole]
Count = Annotated[int, Field(ge=0, le=MAX_INT), _Whole]
CountOrAll = Annotated[int, Field(ge=-1, le=MAX_INT), _Whole]
Samples = Annotated[int, Field(ge=1, le=128), _Whole]
BestOf = Annotated[int, Field(ge=0, le=128), _Whole]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64), _Whole]
Share = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Text = Annotated[str, Field(min_length=1)]
# Named, so that the schema has one place each that says what this server's model knows: openapi.py fills them in.
TokenId = TypeAliasType("TokenId", Annotated[int, Field(ge=0, le=MAX_INT)])
NumLogprobs = TypeAliasType("NumLogprobs", Annotated[int, Field(ge=0, le=MAX_INT), _Whole])
ModelName = TypeAliasType("ModelName", Annotated[str, Field(min_length=1)])
WholeTokenId = Annotated[TokenId, _Whole]
AnyTokenIds = Annotated[list[TokenId], Field(max_length=MAX_TOKENS, fail_fast=True), _WholeNumbers]
TokenIds = Annotated[AnyTokenIds, Field(min_length=1)]
