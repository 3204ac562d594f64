"""Chats and OpenAI's Responses: their bodies and their replies."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count, islice
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from ..async_llm import IndexedChunk
from ..errors import RequestError
from ..outputs import CompletionOutput, RequestOutput
from ..sampling_params import SamplingParams
from ..text.chat import Role
from .client_fields import with_foreign
from .protocol import (
    MAX_STOPS,
    FlatSchemaFormat,
    JsonFormat,
    LookFields,
    Messages,
    NumLogprobs,
    Positive,
    SamplingFields,
    Shortening,
    Strict,
    Text,
    TextFormat,
    guide_of,
    items,
)
from .replies import LOWEST, Job, Logprobs, Made, TokenNames, event, tokens_of, usage
from .tool_calls import (
    AllowedTools,
    FlatTool,
    Function,
    PastCall,
    Tool,
    ToolCall,
    ToolChoice,
    functions_of,
    none_of,
    schema_of,
)

# Fields of all of OpenAI's Responses.
ALWAYS = {"error": None, "parallel_tool_calls": False, "previous_response_id": None, "store": False}
ALWAYS |= {"tool_choice": "none", "tools": [], "truncation": "disabled"}


class TextPart(Strict):
    type: Literal["text"]
    text: str
    cache_control: Any = None  # of Anthropic's clients


class ChatMessage(with_foreign("a chat's message", Strict)):
    role: Role
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_text(cls, message: Any) -> Any:
        """Read an assistant's turn that has no text, as a call of a tool has none."""
        if not isinstance(message, dict) or message.get("role") != "assistant":
            return message
        return {**message, "content": ""} if message.get("content") is None else message

    def for_template(self) -> dict[str, Any]:
        known = {"role", "name", "tool_call_id", "reasoning_content"}
        calls = {"tool_calls": [call.for_template() for call in self.tool_calls]} if self.tool_calls else {}
        return {**self.model_dump(include=known, exclude_none=True), "content": text_of(self), **calls}


def text_of(message: Any) -> str:
    content = message.content
    return content if isinstance(content, str) else "".join(part.text for part in content)


class ChatRequest(with_foreign("a chat", with_foreign("any request", LookFields)), Shortening):
    """max_tokens is the older name of max_completion_tokens; -1 fills the context, as null does."""

    messages: Annotated[list[ChatMessage], Messages]
    max_tokens: Positive | Literal[-1] | None = None
    max_completion_tokens: Positive | Literal[-1] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], items(MAX_STOPS), BeforeValidator(functions_of)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | AllowedTools | None = None

    def sampling_params(self, encode: Callable[[str], list[int]], **others: Any) -> SamplingParams:
        if self.prompt_logprobs is not None:
            raise RequestError("is not available in a chat.", "prompt_logprobs")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("needs logprobs to be true.", "top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return super().sampling_params(encode, logprobs=logprobs, **others)

    def listed_messages(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages]

    @property
    def choice(self) -> Any:
        """Return none, auto, required or a ToolChoice. Of allowed tools it is their mode."""
        is_some = isinstance(self.tool_choice, AllowedTools)
        return (self.tool_choice.allowed_tools.mode if is_some else self.tool_choice) or "auto"

    def allowed_tools(self) -> list[Tool]:
        tools = self.tools or []
        names = self._named()
        return tools if names is None else [tool for tool in tools if tool.function.name in names]

    def _named(self) -> list[str] | None:
        """Return the names that tool_choice has; None if it has all."""
        match self.tool_choice:
            case ToolChoice(function=function):
                return [function.name]
            case AllowedTools(allowed_tools=allowed):
                return [tool.function.name for tool in allowed.tools]
        return None

    def forced_tools(self) -> list[Function]:
        """Return the tools of which the reply calls one."""
        is_forced = self.choice not in ("none", "auto")
        return [tool.function for tool in self.allowed_tools()] if is_forced else []

    def template_options(self, has_tools: bool) -> dict[str, Any]:
        """Return variables for the template. has_tools: whether it shows tools to the model."""
        is_named = isinstance(self.tool_choice, ToolChoice)
        shown = self.tools if is_named else self.allowed_tools()
        shown = shown if has_tools and self.choice != "none" else None
        tools = {"tools": [tool.model_dump(exclude_none=True) for tool in shown]} if shown else {}
        return tools | (self.chat_template_kwargs or {})

    @property
    def may_call(self) -> bool:
        """Whether the model has to choose between a text and a tool."""
        return bool(self.tools) and self.choice == "auto"

    def tool_problem(self, can_choose: bool) -> str | None:
        """Return the reason why no tool can be called as this asks. can_choose: tool_choice may be auto."""
        known = [tool.function.name for tool in self.tools or ()]
        if unknown := [name for name in self._named() or () if name not in known]:
            return f"tool_choice names {unknown[0]!r}, which is not among tools."
        if self.choice == "required" and not self.allowed_tools():
            return "tool_choice is required, and there are no tools."
        if self.may_call and not can_choose:
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
    cache_control: Any = None


class ResponseMessage(Strict):
    """id and status come with messages of earlier responses."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ResponsePart], Field(fail_fast=True)]
    id: str | None = None
    status: str | None = None


class TextOptions(Strict):
    format: Annotated[TextFormat | JsonFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: str | None = None


class ResponsesRequest(with_foreign("a response", with_foreign("any request", SamplingFields))):
    """instructions: a first message of the system. Nothing is stored, and the output is one text."""

    input: Text | Annotated[list[ResponseMessage], Messages]
    instructions: str | None = None
    max_tokens: Positive | None = Field(
        None, alias="max_output_tokens", validation_alias=AliasChoices("max_output_tokens", "max_tokens")
    )
    metadata: dict[str, str] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FlatTool] | None, BeforeValidator(none_of)] = None
    n: None = None
    logprobs: None = None
    prompt_logprobs: None = None
    return_token_ids: None = None

    def listed_messages(self) -> list[dict[str, str]]:
        first = [] if self.instructions is None else [("system", self.instructions)]
        turns = [("user", self.input)]
        if not isinstance(self.input, str):
            turns = [(message.role, text_of(message)) for message in self.input]
        return [{"role": role, "content": text} for role, text in first + turns]

    def guides(self) -> dict[str, tuple[str, Any]]:
        form = self.text and self.text.format
        return super().guides() | guide_of("text.format", form)

    def name_of(self, field: str) -> str | None:
        names = {"max_tokens": "max_output_tokens", "messages": "input", "prompt": "input"}
        return names.get(field) or super().name_of(field)


def chat_logprobs(names: TokenNames, num_top: int, tokens: Iterable[tuple[int, Logprobs]]) -> dict[str, list]:
    def named(token_id: int, value: float) -> dict[str, Any]:
        return {
            "token": names.name(token_id),
            "logprob": max(value, LOWEST),
            "bytes": list(names.bytes_of(token_id)),
        }

    content = []
    for token_id, logprobs in tokens:
        top = [named(*pair) for pair in islice(logprobs.items(), num_top)]
        content.append(named(token_id, logprobs[token_id]) | {"top_logprobs": top})
    return {"content": content}


class Chat(Job):
    id_prefix = "chatcmpl-"
    reply_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def __post_init__(self):
        super().__post_init__()
        names = [tool.name for tool in self.form.forced_tools()]
        self._calls = defaultdict(partial(ToolCall, names)) if names else None  # by sample

    def choice(self, i: int, made: Made) -> dict[str, Any]:
        is_whole = isinstance(made, CompletionOutput)
        text: dict[str, Any] = {"content": made.text or "" if is_whole else made.text}
        ids, tokens = tokens_of(made)
        end = self.end_of_choice(made, ids)
        if self._calls is not None:
            growing = self._calls[made.index]
            call = growing.add(made.text or "", made.finish_reason == "stop")
            if made.finish_reason == "stop" and growing.is_whole:
                end["finish_reason"] = "tool_calls"
            if not is_whole:
                text = {"tool_calls": [{"index": 0, **call}]} if call else {}
            elif end["finish_reason"] == "tool_calls":
                text = {"content": None, "tool_calls": [call]}
        if is_whole:
            text = {"role": "assistant", **text, "refusal": None}
        num_top = self.form.top_logprobs or 0
        logprobs = chat_logprobs(self.names, num_top, tokens) if self.form.logprobs else None
        return {"index": made.index, "message" if is_whole else "delta": text, "logprobs": logprobs, **end}

    def record(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        ids = {"prompt_token_ids": outputs[0].prompt_token_ids} if self.form.return_token_ids else {}
        return super().record(outputs) | ids

    def begin(self) -> str:
        delta = {"role": "assistant", "content": "" if self._calls is None else None}
        return "".join(self._event({"index": i, "delta": delta}) for i in range(self.params.n))


class Responses(Job):
    """The plain form of OpenAI's Responses: one text as the output."""

    id_prefix = "resp_"
    reply_object = event_object = "response"
    done = ""  # the last event is a response's end

    def __post_init__(self):
        super().__post_init__()
        self._numbers = count()
        self._item_id = self.head["id"].replace("resp", "msg")
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def begin(self) -> str:
        started = self._response("in_progress", [])
        return (
            self._told("created", response=started)
            + self._told("in_progress", response=started)
            + self._told("output_item.added", output_index=0, item=self._item("in_progress", []))
            + self._told("content_part.added", **self._place, part=_part(""))
        )

    def write(self, chunks: list[IndexedChunk]) -> Iterator[str]:
        texts = (chunk.text for _, chunk in chunks if chunk.text)
        return (self._told("output_text.delta", **self._place, delta=text, logprobs=[]) for text in texts)

    def end(self, outputs: list[RequestOutput]) -> Iterator[str]:
        ended = self.record(outputs)
        text = outputs[0].outputs[0].text or ""
        yield self._told("output_text.done", **self._place, text=text, logprobs=[])
        yield self._told("content_part.done", **self._place, part=_part(text))
        yield self._told("output_item.done", output_index=0, item=ended["output"][0])
        yield self._told(ended["status"], response=ended)

    def record(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        [sample] = outputs[0].outputs
        status = "incomplete" if sample.finish_reason == "length" else "completed"
        return self._response(status, [self._item(status, [_part(sample.text or "")])], _counts(outputs))

    def _response(self, status: str, items: list, counts: dict[str, Any] | None = None) -> dict[str, Any]:
        form = self.form.text and self.form.text.format
        told = form and form.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": self.head["id"],
            "object": "response",
            "created_at": self.head["created"],
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": self.form.instructions,
            "max_output_tokens": self.form.max_tokens,
            "metadata": self.form.metadata or {},
            "model": self.head["model"],
            "output": items,
            "temperature": self.params.temperature,
            "top_p": self.params.top_p,
            "usage": counts,
            **ALWAYS,
            "text": {"format": told or {"type": "text"}},
        }

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._item_id, "type": "message", "status": status}
        return {**head, "role": "assistant", "content": content}

    def _told(self, name: str, **fields: Any) -> str:
        kind = f"response.{name}"
        return f"event: {kind}\n" + event({"type": kind, "sequence_number": next(self._numbers), **fields})


def _counts(outputs: list[RequestOutput]) -> dict[str, Any]:
    counts = usage(outputs)
    return {
        "input_tokens": counts["prompt_tokens"],
        "output_tokens": counts["completion_tokens"],
        "total_tokens": counts["total_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens_details": {"reasoning_tokens": 0},
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
