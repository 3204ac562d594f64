"""Types of fields, each with its limits, which /openapi.json shows too.

A field that may be null is as if it were not there. JSON has one kind of number, so that 16.0 is a whole number in it:
`whole` stands behind the limits, or pydantic would leave them out of the schema.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from typing_extensions import TypeAliasType

MAX_INT = 2**31 - 1
MAX_PROMPTS = 256  # of one request


class Strict(BaseModel):
    """Refuses unknown fields, NaN, and values of another type: "3" is no number and 1 is not true."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    def name_of(self, field: str) -> str:
        """What this request calls what the engine calls `field`."""
        return field


def whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Whole = BeforeValidator(whole)
Positive = Annotated[int, Field(ge=1, le=MAX_INT), _Whole]
Count = Annotated[int, Field(ge=0, le=MAX_INT), _Whole]
CountOrAll = Annotated[int, Field(ge=-1, le=MAX_INT), _Whole]
Samples = Annotated[int, Field(ge=1, le=128), _Whole]
BestOf = Annotated[int, Field(ge=0, le=128), _Whole]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64), _Whole]
Share = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Text = Annotated[str, Field(min_length=1)]
# Named, so that the schema has one place each that says what this server's model knows: openapi.py fills them in.
TokenId = TypeAliasType("TokenId", Annotated[int, Field(ge=0, le=MAX_INT), _Whole])
NumLogprobs = TypeAliasType("NumLogprobs", Annotated[int, Field(ge=0, le=MAX_INT), _Whole])
ModelName = TypeAliasType("ModelName", Annotated[str, Field(min_length=1)])
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
