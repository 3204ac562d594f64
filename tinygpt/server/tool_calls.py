"""Calls of tools that a chat's tool_choice forces: guided texts, which replies tell as calls."""

import copy
import json
import re
import secrets
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo

from ..engine.json_schema import subschemas
from ..wire import MALFORMED
from .client_fields import DROPPING
from .protocol import Strict, Text

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# Of a text that names the tool, as the guided JSON writes it.
HEAD = re.compile(r'\{ ?"name" ?: ?"([^"]*)" ?, ?"arguments" ?: ?(?=\S)')


class Function(Strict):
    name: Annotated[str, Field(pattern=r"^[\w.:-]+$", max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function
    cache_control: Any = Field(None, exclude=True)


class FlatTool(Function):
    """A tool of a response."""

    type: Literal["function"]


def none_of(tools: Any, info: ValidationInfo) -> Any:
    """Return a response's tools, and None for those of a DROPPING request."""
    return None if info.context == DROPPING else tools


def functions_of(tools: Any, info: ValidationInfo) -> Any:
    """Return the tools, of a DROPPING request without those of other types."""
    if info.context != DROPPING or not isinstance(tools, list):
        return tools
    return [tool for tool in tools if not isinstance(tool, dict) or tool.get("type") == "function"]


class NamedFunction(Strict):
    name: Text


class ToolChoice(Strict):
    type: Literal["function"]
    function: NamedFunction


class SomeTools(Strict):
    mode: Literal["auto", "required"]
    tools: list[ToolChoice]


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: SomeTools


class CalledFunction(Strict):
    """parsed_arguments: what OpenAI's client adds."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class PastCall(Strict):
    """A call in an assistant's turn. index comes with calls of a stream."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the call with its arguments as an object, as templates of checkpoints expect."""
        arguments: Any = self.function.arguments
        with suppress(*MALFORMED):
            arguments = json.loads(arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


def schema_of(tools: list[Function]) -> dict[str, Any]:
    """Return the schema of a call's arguments; of several tools, the text names its own."""
    arguments = [tool.parameters or NO_ARGUMENTS for tool in tools]
    if len(tools) == 1:
        return arguments[0]
    return {"anyOf": [_named_call(i, *pair) for i, pair in enumerate(zip(tools, arguments, strict=True))]}


def _named_call(i: int, tool: Function, arguments: dict[str, Any]) -> dict[str, Any]:
    """i: the place of the tool, to which references of its schema are moved."""
    arguments = copy.deepcopy(arguments)
    for node in [*subschemas(arguments)]:
        if str(node.get("$ref")).startswith("#"):
            node["$ref"] = f"#/anyOf/{i}/properties/arguments{node['$ref'][1:]}"
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


class ToolCall:
    """The call that one text is, as it grows."""

    def __init__(self, names: list[str]):
        self.id = f"call_{secrets.token_hex(12)}"
        self._name = names[0] if len(names) == 1 else None
        self._is_wrapped = len(names) > 1
        self._text = ""
        self._told: int | None = None  # characters of the text

    @property
    def is_whole(self) -> bool:
        """Return whether the text is all of the call: a stop text may have cut it."""
        with suppress(*MALFORMED):
            json.loads(self._text)
            return True
        return False

    def add(self, text: str, is_over: bool) -> dict[str, Any] | None:
        """Return the next part of the call, of which the first has its name; None before that is known."""
        self._text += text
        head: dict[str, Any] = {}
        if self._told is None:
            start = 0
            if self._is_wrapped:
                named = HEAD.match(self._text)
                if not named:
                    return None
                start = named.end()
                self._name = named[1]
            self._told = start
            head = {"id": self.id, "type": "function"}
        end = len(self._text)
        if self._is_wrapped:  # the last brace is not the arguments'
            shown = self._text.rstrip(" ")
            end = max(self._told, len(shown.removesuffix("}").rstrip(" ") if is_over else shown.rstrip(" }")))
        arguments = self._text[self._told : end]
        self._told = end
        name = {"name": self._name} if head else {}
        return {**head, "function": {**name, "arguments": arguments}}
