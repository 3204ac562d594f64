"""Request bodies as strict pydantic models: OpenAI's fields, and vLLM's for the rest.

Types and sizes are checked here; SamplingParams checks the bounds of sampling fields.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from functools import reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import AliasChoices, BeforeValidator, Field, create_model, model_validator

from ..aliases import renamed
from ..errors import RequestError
from ..sampling_params import GUIDED_FIELDS, SAMPLING_FIELDS, SamplingParams
from ..text.chat import Role
from ..wire import UNSENDABLE
from .client_fields import with_others
from .tool_calls import Function, PastCall, Tool, ToolChoice, functions_of, schema_of
from .values import (
    IGNORED,
    MAX_IDS,
    MAX_PROMPTS,
    MAX_SAMPLES,
    MAX_STOPS,
    MAX_WORDS,
    Biases,
    Count,
    IdLists,
    Messages,
    ModelName,
    NumLogprobs,
    Pattern,
    Pooling,
    Position,
    Positions,
    Positive,
    Prompts,
    Schema,
    Stops,
    Strict,
    Text,
    Texts,
    TokenId,
    TokenIds,
    Whole,
    items,
    whole_numbers,
)

ANY_OBJECT = {"type": "object"}


class Form(Strict):
    model: ModelName | None = None
    split_special_tokens: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, given: Any) -> Any:
        given = super()._one_unknown_field(given)
        if isinstance(given, dict):
            names = {name for name, field in cls.model_fields.items() if field.alias not in given}
            with suppress(RequestError):  # of two names for one thing, the other program's is unknown
                return renamed(given, names | cls.fields_by_name().keys(), IGNORED)
        return given


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
    def _asked(cls, given: Any) -> Any:
        """Pass over fields that ask for nothing: vLLM's clients may send all of its own."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if not (value is None or value is False)}


class NamedSchema(Strict):
    name: Text
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class PlainFormat(Strict):
    type: Literal["text", "json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class FlatSchemaFormat(NamedSchema):
    type: Literal["json_schema"]


def _on_the_wire(hint: Any) -> Any:
    """Return a type of SamplingParams as JSON has it."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return reduce(or_, (_on_the_wire(each) for each in args if not is_dataclass(each)))
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
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
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
        biases = {
            token_id: bias
            for key, bias in (self.logit_bias or {}).items()
            for token_id in ([int(key)] if key.isascii() and key.isdigit() else encode(key))
        }
        given = {name: getattr(self, name) for name in self.model_fields_set & SAMPLING_FIELDS.keys()}
        given |= others | dict(guides.values())
        given |= {
            "seed": None if self.seed in (None, -1) else self.seed % 2**64,
            "best_of": self.best_of or None,
            "logit_bias": biases,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if self.use_beam_search:
            given.setdefault("num_beams", self.n or 1)
        given.setdefault("temperature", 0.0 if given.get("num_beams", 1) > 1 else 1.0)  # OpenAI's default
        return SamplingParams(**given)

    def name_of(self, field: str) -> str | None:
        guides = {field: name for name, (field, _) in self.guides().items()}
        if field == "num_beams" and self.num_beams is None and self.use_beam_search:
            return "use_beam_search"
        return guides.get(field) or super().name_of(field)

    def guides(self) -> dict[str, tuple[str, Any]]:
        """Return {name in the request: (guided field of SamplingParams, value)} of all that are given."""
        found = {name: (name, getattr(self, name)) for name in GUIDED_FIELDS}
        if self.structured_outputs is not None:
            given = self.structured_outputs.model_dump(by_alias=True)
            for name in ("json", "regex", "choice", "grammar"):
                found[f"structured_outputs.{name}"] = f"guided_{name}", given[name]
            if given["json_object"]:
                found["structured_outputs.json_object"] = "guided_json", ANY_OBJECT
        found |= _guide("response_format", self.response_format)
        return {name: pair for name, pair in found.items() if pair[1] is not None}


def _guide(name: str, form: Any) -> dict[str, tuple[str, Any]]:
    """Return the guide of OpenAI's format, by its name in the request."""
    match form:
        case SchemaFormat():
            return {f"{name}.json_schema.schema": ("guided_json", form.json_schema.schema_)}
        case FlatSchemaFormat():
            return {f"{name}.schema": ("guided_json", form.schema_)}
        case PlainFormat(type="json_object"):
            return {name: ("guided_json", ANY_OBJECT)}
    return {}


class Array(Strict):
    """data: base64, little-endian."""

    dtype: Literal["float16", "float32", "float64"] = "float32"
    shape: list[Count] = Field(max_length=4)
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


class CompletionRequest(with_others("any request", LookFields)):
    """null or an empty prompt starts at the BOS token."""

    prompt: Prompts | None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    max_tokens: Count | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class GenerateRequest(SamplingFields):
    prompt: str | TokenIds | None
    max_tokens: Positive | None = None
    logprobs: NumLogprobs | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(with_others("a chat's message", Strict)):
    role: Role
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_text(cls, given: Any) -> Any:
        """Read an assistant's turn that has no text, as a call of a tool has none."""
        is_silent = isinstance(given, dict) and given.get("role") == "assistant"
        return {**given, "content": ""} if is_silent and given.get("content") is None else given

    def for_template(self) -> dict[str, Any]:
        known = {"role", "name", "tool_call_id", "reasoning_content"}
        calls = {"tool_calls": [call.for_template() for call in self.tool_calls]} if self.tool_calls else {}
        return {**self.model_dump(include=known, exclude_none=True), "content": text_of(self), **calls}


def text_of(message: Any) -> str:
    content = message.content
    return content if isinstance(content, str) else "".join(part.text for part in content)


class ChatRequest(with_others("a chat", with_others("any request", LookFields))):
    """max_tokens is the older name of max_completion_tokens."""

    messages: Annotated[list[ChatMessage], Messages]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], items(MAX_STOPS), BeforeValidator(functions_of)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None

    def listed_messages(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages]

    def forced_tools(self) -> list[Function]:
        """Return the tools of which the reply calls one."""
        tools = [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, ToolChoice):
            return [tool for tool in tools if tool.name == self.tool_choice.function.name]
        return tools if self.tool_choice == "required" else []

    def template_options(self, has_tools: bool) -> dict[str, Any]:
        """Return variables for the template. has_tools: whether it shows tools to the model."""
        shown = self.tools if has_tools and self.tool_choice != "none" else None
        tools = {"tools": [tool.model_dump(exclude_none=True) for tool in shown]} if shown else {}
        return tools | (self.chat_template_kwargs or {})

    def tool_problem(self, can_choose: bool) -> str | None:
        """Return the reason why no tool can be called as this asks. can_choose: tool_choice may be auto."""
        if isinstance(self.tool_choice, ToolChoice) and not self.forced_tools():
            return f"tool_choice names {self.tool_choice.function.name!r}, which is not among tools."
        if self.tool_choice == "required" and not self.tools:
            return "tool_choice is required, and there are no tools."
        if self.tools and self.tool_choice in (None, "auto") and not can_choose:
            asked = "tool_choice is auto (as it is by default, with tools)"
            other = "name a function, or send required or none"
            return f"{asked}, and this model does not choose between a text and a tool: {other}."
        return None

    def guides(self) -> dict[str, tuple[str, Any]]:
        tools = self.forced_tools()
        return super().guides() | ({"tools": ("guided_json", schema_of(tools))} if tools else {})

    def name_of(self, field: str) -> str | None:
        if field == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return "messages" if field == "prompt" else super().name_of(field)


class ResponsePart(Strict):
    """A text of a message. The last fields come with texts of earlier responses, from OpenAI's client."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


class ResponseMessage(Strict):
    """id and status come with messages of earlier responses."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ResponsePart], Field(fail_fast=True)]
    id: str | None = None
    status: str | None = None


class TextOptions(Strict):
    format: Annotated[PlainFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: str | None = None


class ResponsesRequest(with_others("a response", with_others("any request", SamplingFields))):
    """instructions: a first message of the system. Nothing is stored, and the output is one text."""

    input: Text | Annotated[list[ResponseMessage], Messages]
    instructions: str | None = None
    max_tokens: Positive | None = Field(
        None, alias="max_output_tokens", validation_alias=AliasChoices("max_output_tokens", "max_tokens")
    )
    metadata: dict[str, str] | None = None
    text: TextOptions | None = None
    n: None = None
    logprobs: None = None
    prompt_logprobs: None = None
    return_token_ids: None = None

    def listed_messages(self) -> list[dict[str, str]]:
        first = [] if self.instructions is None else [("system", self.instructions)]
        given = [("user", self.input)]
        if not isinstance(self.input, str):
            given = [(message.role, text_of(message)) for message in self.input]
        return [{"role": role, "content": text} for role, text in first + given]

    def guides(self) -> dict[str, tuple[str, Any]]:
        form = self.text and self.text.format
        return super().guides() | _guide("text.format", form)

    def name_of(self, field: str) -> str | None:
        names = {"max_tokens": "max_output_tokens", "messages": "input", "prompt": "input"}
        return names.get(field) or super().name_of(field)


class ClassifyRequest(Form):
    input: Text | TokenIds | Texts | IdLists
    user: str | None = None
    add_special_tokens: bool | None = None


class LensRequest(Form):
    prompt: Text | TokenIds
    add_special_tokens: bool | None = None


class EmbeddingRequest(ClassifyRequest):
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Positive | None = None
    pooling: Pooling = "last"


class ScoreRequest(Form):
    """One text_1 for all of text_2, or one for each."""

    text_1: Text | Texts
    text_2: Text | Texts
    pooling: Pooling = "last"
    user: str | None = None


class ContinuationsRequest(Form):
    prompt: str | TokenIds | None
    continuations: Annotated[list[Text | TokenIds], items(MAX_PROMPTS)]
    soft_prompt: Text | None = None


class TokenizeRequest(Form):
    """Special tokens in the prompt are special tokens here, so that clients learn their ids."""

    takes_adapter = True
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    takes_adapter = True
    model: ModelName | None = None
    tokens: Annotated[list[TokenId], items(MAX_IDS), BeforeValidator(whole_numbers)]
    skip_special_tokens: bool | None = None
