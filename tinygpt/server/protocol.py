"""Request bodies as strict pydantic models: types of values, fields of sampling, completions and looks.

Types and sizes are checked here; SamplingParams checks the bounds of sampling fields.
"""

import base64
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator
from typing_extensions import TypeAliasType

from ..aliases import OURS, renamed
from ..engine.guided import MAX_CHARACTERS
from ..errors import RequestError
from ..fields import MAX_COUNT, token_id_of
from ..look.edits import Edit
from ..sampling_params import GUIDED_FIELDS, SAMPLING_FIELDS, SamplingParams
from ..wire import UNSENDABLE
from .client_fields import USUAL, with_foreign, without_idle
from .refusals import ApiError

# Of one request.
MAX_BIAS = 100.0  # OpenAI's
MAX_PROMPTS = 256
MAX_SAMPLES = 128
MAX_STOPS = 64
MAX_WORDS = 10_000
MAX_DIMENSIONS = 4
MAX_IDS = 1_000_000
MAX_FIELDS = 256  # that are read; more than any form knows
IGNORED = ("pad_token_id", "use_cache")  # of transformers
ANY_OBJECT = {"type": "object"}
NO_TEXT = re.compile("[+-]?[0-9]+|")  # of a key: an id with a sign, or of a number that no token has
LOOK_FIELDS = ("capture", "edits", "extra_args")


def _whole(value: Any) -> Any:
    """Return 16 for 16.0: JSON has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole_numbers(value: Any) -> Any:
    return [*map(_whole, value)] if isinstance(value, list) and float in set(map(type, value)) else value


def _to_the_first_error(biases: Any) -> Any:
    """Return the first bad bias alone: pydantic has fail_fast for lists, not for dicts. [] is llama.cpp's none."""
    if biases == []:
        return {}
    for key, bias in biases.items() if isinstance(biases, dict) else ():
        if len(key) > 1000 or type(bias) not in (int, float) or not abs(bias) <= MAX_BIAS:
            return {key: bias}
    return biases


def items(most: int, least: int | None = None) -> Any:
    return Field(min_length=least, max_length=most, fail_fast=True)


Whole = BeforeValidator(_whole)  # stands after the limits, or the schema would lack them
# Named types have a schema each, into which the app writes the limits of its model.
TokenId = TypeAliasType("TokenId", Annotated[int, Field(ge=0, le=MAX_COUNT)])
NumLogprobs = TypeAliasType("NumLogprobs", Annotated[int, Field(ge=0, le=MAX_COUNT), Whole])
ModelName = TypeAliasType("ModelName", Annotated[str, Field(min_length=1)])

Positive = Annotated[int, Field(ge=1, le=MAX_COUNT), Whole]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT), Whole]
Position = Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT), Whole]
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
    def _one_unknown_field(cls, body: Any) -> Any:
        """Drop unknown fields that are null, and all others but one: 300 000 would take seconds."""
        if not isinstance(body, dict) or (len(body) <= MAX_FIELDS and None not in body.values()):
            return body
        known = cls.known_names()
        body = {name: value for name, value in body.items() if value is not None or name in known}
        unknown = next((name for name in body if name not in known), None)
        if len(body) <= MAX_FIELDS or unknown is None:
            return body
        return {name: body[name] for name in (*known, unknown) if name in body}

    @classmethod
    @cache
    def known_names(cls) -> set[str]:
        return {*cls.fields_by_name(), *cls.model_fields, *OURS, *IGNORED, *USUAL}

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


class Form(Strict):
    model: ModelName | None = None
    split_special_tokens: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, body: Any) -> Any:
        body = super()._one_unknown_field(body)
        if isinstance(body, dict):
            body = without_idle(body, {*cls.fields_by_name(), *cls.model_fields})
        if not isinstance(body, dict) or body.keys() <= cls.fields_by_name().keys():
            return body
        names = {name for name, field in cls.model_fields.items() if field.alias not in body}
        with suppress(RequestError):  # of two names for one thing, the other program's is unknown
            return renamed(body, names | cls.fields_by_name().keys(), IGNORED)
        return body


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(Strict):
    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: list[Text] | None = None
    grammar: Pattern | None = None

    @model_validator(mode="before")
    @classmethod
    def _asked(cls, body: Any) -> Any:
        """Pass over fields that ask for nothing: vLLM's clients may send all of its own."""
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if not (value is None or value is False)}


class NamedSchema(Strict):
    name: Text
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class JsonFormat(Strict):
    """value: of huggingface_hub's client. schema: of llama.cpp's."""

    type: Literal["json_object", "json"]
    value: Schema | None = None
    schema_: Schema | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _one_schema(self) -> "JsonFormat":
        if None not in (self.value, self.schema_) and self.value != self.schema_:
            raise ValueError("has a `value` and another `schema`, and takes one schema")
        return self

    @property
    def guide(self) -> Schema:
        given = self.schema_ if self.value is None else self.value
        return ANY_OBJECT if given is None else given


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class FlatSchemaFormat(NamedSchema):
    type: Literal["json_schema"]


def _on_the_wire(hint: Any) -> Any:
    """Return a type of SamplingParams as JSON has it."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return reduce(or_, (_on_the_wire(kind) for kind in args if not is_dataclass(kind)))
    if origin is Iterable:
        return Annotated[list[_on_the_wire(args[0])], items(MAX_IDS)]
    if origin is Mapping:  # the keys of a JSON object are strings
        return dict[str, _on_the_wire(args[1])]
    return {int: Annotated[int, Whole], str: Text}.get(hint, hint)


_HINTS = get_type_hints(SamplingParams)
_SAMPLING = {
    name: (
        _on_the_wire(_HINTS[name]) | None,
        Field(None, description=f"{field.metadata['help']} ({field.metadata['rule'].allowed})"),
    )
    for name, field in SAMPLING_FIELDS.items()
    if name not in UNSENDABLE
}


class SamplingFields(create_model("SamplingFields", __base__=Form, **_SAMPLING)):
    """Fields of SamplingParams under the same names."""

    takes_adapter = True
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES), Whole] | None = None
    best_of: Annotated[int, Field(ge=0, le=MAX_SAMPLES), Whole] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64), Whole] | None = None
    stop: Stops | None = None
    logit_bias: Biases | None = None
    dry_sequence_breakers: Stops | None = None
    bad_words: Text | Annotated[list[Text], items(MAX_WORDS)] | None = None
    bad_words_ids: Annotated[list[TokenIds], items(MAX_WORDS)] | None = None
    prompt_logprobs: NumLogprobs | None = None
    use_beam_search: bool | None = None
    guided_json: Schema | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")] | None = (
        None
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    return_token_ids: bool | None = None

    def sampling_params(self, encode: Callable[[str], list[int]], **others: Any) -> SamplingParams:
        """Return the params. encode: of logit_bias's keys that are texts. others: fields already read."""
        guides = self.guides()
        if len(guides) > 1:
            *before, last = guides
            raise RequestError(f"is given next to {' and '.join(before)}: give one of them.", last)
        biases = {}
        for key, bias in (self.logit_bias or {}).items():
            token_id = token_id_of(key)
            if token_id == key and NO_TEXT.fullmatch(key):
                raise RequestError(
                    f"has the key {key!r}: keys are token ids from 0 on, or texts.", "logit_bias"
                )
            biases |= dict.fromkeys([token_id] if isinstance(token_id, int) else encode(key), bias)
        sampling = {name: getattr(self, name) for name in self.model_fields_set & SAMPLING_FIELDS.keys()}
        sampling |= others | dict(guides.values())
        sampling |= {
            "seed": None if self.seed in (None, -1) else self.seed % 2**64,
            "best_of": self.best_of or None,
            "logit_bias": biases,
        }
        sampling = {name: value for name, value in sampling.items() if value is not None}
        if self.use_beam_search:
            sampling.setdefault("num_beams", self.n or 1)
        is_drawn = sampling.get("num_beams", 1) == 1
        sampling.setdefault("temperature", 1.0 if is_drawn else 0.0)  # OpenAI's default
        return SamplingParams(**sampling)

    def look_params(self, is_allowed: bool, vectors: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def name_of(self, field: str) -> str | None:
        guides = {field: name for name, (field, _) in self.guides().items()}
        if field == "num_beams" and self.num_beams is None and self.use_beam_search:
            return "use_beam_search"
        return guides.get(field) or super().name_of(field)

    def guides(self) -> dict[str, tuple[str, Any]]:
        """Return {name in the request: (guided field of SamplingParams, value)} of all that are given."""
        guides = {name: (name, getattr(self, name)) for name in GUIDED_FIELDS}
        if self.structured_outputs is not None:
            outputs = self.structured_outputs.model_dump(by_alias=True)
            for name in ("json", "regex", "choice", "grammar"):
                guides[f"structured_outputs.{name}"] = f"guided_{name}", outputs[name]
            if outputs["json_object"]:
                guides["structured_outputs.json_object"] = "guided_json", ANY_OBJECT
        guides |= guide_of("response_format", self.response_format)
        return {name: pair for name, pair in guides.items() if pair[1] is not None}


def guide_of(name: str, form: Any) -> dict[str, tuple[str, Any]]:
    """Return the guide of OpenAI's format, by its name in the request."""
    match form:
        case SchemaFormat():
            return {f"{name}.json_schema.schema": ("guided_json", form.json_schema.schema_)}
        case FlatSchemaFormat():
            return {f"{name}.schema": ("guided_json", form.schema_)}
        case JsonFormat():
            return {name: ("guided_json", form.guide)}
    return {}


class Array(Strict):
    """data: base64, little-endian."""

    dtype: Literal["float16", "float32", "float64"] = "float32"
    shape: list[Count] = Field(max_length=MAX_DIMENSIONS)
    data: str


Values = float | list[Any] | Array


class EditFields(Strict):
    """tinygpt.Edit without `function`."""

    name: Text
    keep: Values = 1.0
    value: Values = 0.0
    at: Literal["new"] | Position | Positions | None = None
    index: Position | Positions = Field([])
    project_out: Values | None = None


class ExtraArgs(Strict):
    """vllm-lens's: layers whose output is captured."""

    output_residual_stream: list[Count] = Field(max_length=MAX_PROMPTS)


class LookFields(SamplingFields):
    capture: Text | Annotated[list[Text], items(MAX_PROMPTS)] | None = None
    edits: Annotated[list[EditFields], items(MAX_PROMPTS)] | None = None
    steer: dict[str, Annotated[float, Field(ge=-1e4, le=1e4)]] | None = None
    extra_args: ExtraArgs | None = None

    def look_params(self, is_allowed: bool, vectors: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields of SamplingParams. vectors: ControlVector by name. Raise ApiError, RequestError."""
        asked = [name for name in LOOK_FIELDS if getattr(self, name) is not None]
        if asked and not is_allowed:
            raise ApiError(400, f"{asked[0]} needs a server that was started with --look.", asked[0])
        edits = [_edit(f"edits[{i}]", fields) for i, fields in enumerate(self.edits or ())]
        for name, strength in (self.steer or {}).items():
            if name not in vectors:
                known = (
                    f"it has {', '.join(vectors)}" if vectors else "start it with --control-vector NAME=FILE"
                )
                raise ApiError(400, f"this server has no control vector {name!r}: {known}.", "steer")
            edits += vectors[name].edits(strength)
        names = [self.capture] if isinstance(self.capture, str) else list(self.capture or ())
        if self.extra_args is not None:
            names += [f"blocks.{layer}.hook_resid_post" for layer in self.extra_args.output_residual_stream]
        return {"capture": names or None, "edits": edits or None}


def _edit(field: str, form: Any) -> Edit:
    values = {name: getattr(form, name) for name in form.model_fields_set}
    try:
        arrays = [name for name in ("keep", "value", "project_out") if values.get(name) is not None]
        return Edit(**values | {name: _array(values[name]) for name in arrays})
    except RequestError as error:
        raise error.named(f"{field}.{error.field}") from None
    except (ValueError, TypeError, OverflowError) as error:
        reason = str(error).rstrip(".")
        raise RequestError(f"has an array that cannot be read: {reason}.", field) from None


def _array(form: Any) -> np.ndarray:
    """Raise ValueError, TypeError or OverflowError."""
    if isinstance(form, Array):
        data = base64.b64decode(form.data, validate=True)
        array = np.frombuffer(data, np.dtype(form.dtype).newbyteorder("<")).reshape(form.shape)
    else:
        array = np.array(form, np.float32)
    if array.ndim > MAX_DIMENSIONS or not np.isfinite(array).all():
        raise ValueError(f"its numbers must be finite, and its dimensions {MAX_DIMENSIONS} at most")
    return array


class Shortening(Strict):
    """vLLM's. -1: as many tokens as the model's length leaves."""

    truncate_prompt_tokens: Positive | Literal[-1] | None = None
    truncation_side: Literal["left", "right"] | None = None


class CompletionRequest(with_foreign("any request", LookFields), Shortening):
    """null or an empty prompt starts at the BOS token. A max_tokens of -1 fills the context."""

    prompt: Prompts | None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    max_tokens: Count | Literal[-1] | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class GenerateRequest(SamplingFields):
    prompt: str | TokenIds | None
    max_tokens: Positive | None = None
    logprobs: NumLogprobs | None = None
