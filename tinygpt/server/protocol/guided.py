"""GuidedFields: what a text has to be, as vLLM spells it today and spelled it first, and as OpenAI does."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from tinygpt.errors import RequestError
from tinygpt.sampling_params import SamplingParams
from tinygpt.server.protocol.fields import Strict, Text
from tinygpt.server.protocol.sampling import Choices, Pattern, SamplingFields, Schema

ANY_OBJECT = {"type": "object"}


class StructuredOutputs(Strict):
    """vLLM's; one of the first five is to be given. The others are the same either way: nothing else is fallen back to,
    and JSON never has more than a space between its parts."""

    json_: Schema | None = Field(None, alias="json", description="a JSON schema, or the same as a text")
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None

    def given(self) -> dict[str, tuple[str, Any]]:
        found = {
            "json": ("guided_json", self.json_),
            "json_object": ("guided_json", ANY_OBJECT if self.json_object else None),
            "regex": ("guided_regex", self.regex),
            "choice": ("guided_choice", self.choice),
            "grammar": ("guided_grammar", self.grammar),
        }
        return {f"structured_outputs.{name}": pair for name, pair in found.items()}


class NamedSchema(Strict):
    """strict: a schema is always followed strictly."""

    name: Text
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]

    def given(self) -> dict[str, tuple[str, Any]]:
        return {}


class ObjectFormat(Strict):
    type: Literal["json_object"]

    def given(self) -> dict[str, tuple[str, Any]]:
        return {"response_format": ("guided_json", ANY_OBJECT)}


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema

    def given(self) -> dict[str, tuple[str, Any]]:
        return {"response_format.json_schema.schema": ("guided_json", self.json_schema.schema_)}


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class GuidedFields(SamplingFields):
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None

    def sampling_params(self, encode: Callable[[str], list[int]], **others: Any) -> SamplingParams:
        given = self._given()
        if len(given) > 1:
            *others_given, last = given
            raise RequestError(f"{last} is given beside {' and '.join(others_given)}: a text is guided by one of them.")
        return super().sampling_params(encode, **others, **dict(given.values()))

    def name_of(self, field: str) -> str | None:
        given = (name for name, (meant, _) in self._given().items() if meant == field)
        return next(given, None) or super().name_of(field)

    def _given(self) -> dict[str, tuple[str, Any]]:
        """What the request calls it -> (the guided field that it is, its value)."""
        names = ("guided_choice", "guided_regex", "guided_json", "guided_grammar")
        found = {name: (name, getattr(self, name)) for name in names}
        for other in (self.structured_outputs, self.response_format):
            found |= {} if other is None else other.given()
        return {name: pair for name, pair in found.items() if pair[1] is not None}
