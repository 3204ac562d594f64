"""OpenAI's fields on which nothing here depends, and fields that may ask for a thing that is not there.

Models of requests derive from these tables, which the README repeats; fields that do something are in `protocol`.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationInfo, create_model

DROPPING = "dropping"  # the context of a request whose refused fields are passed over
EMPTY = (None, False, 0, "", "none", [], {})  # what asks for nothing in any field


@dataclass(frozen=True)
class RefusedField:
    """A field that is refused for this reason, but for EMPTY and a value that says what is so anyway."""

    reason: str
    usual: Any = None

    def check(self, value: Any, info: ValidationInfo) -> Any:
        """Return the value if it asks for nothing, and None for another one of a DROPPING request."""
        if value in EMPTY or value == self.usual:
            return value
        if info.context == DROPPING:
            return None
        raise ValueError(self.reason)


@dataclass(frozen=True)
class ForeignFields:
    """Fields of one model that are passed over, and fields that are refused unless they ask for nothing."""

    passed: str
    refused: dict[str, RefusedField]

    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            name: (Any, Field(None, description="Passed over.")) for name in self.passed.split()
        }
        for name, refused in self.refused.items():
            checked = Annotated[Any, AfterValidator(refused.check)]
            fields[name] = checked, Field(None, description=f"Nothing, as {refused.reason}.")
        return fields


TEXTS_ALONE = RefusedField("texts alone are read and written here")
STORED = RefusedField("nothing is stored here; send all messages")
CUT = 'send overflow, as "truncate"'
CHAT_TOOLS = "/v1/chat/completions calls tools, by a tool_choice that is forced"
FOREIGN = {
    "any request": ForeignFields(
        "store metadata service_tier safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention",
        {"moderation": RefusedField("no text is judged here")},
    ),
    "a chat": ForeignFields(
        "parallel_tool_calls reasoning_effort verbosity prediction",
        {
            "modalities": RefusedField(TEXTS_ALONE.reason, ["text"]),
            "audio": TEXTS_ALONE,
            "functions": RefusedField("tools is the newer name"),
            "function_call": RefusedField("tool_choice is the newer name", "auto"),
            "web_search_options": RefusedField("nothing is searched here"),
        },
    ),
    "a chat's message": ForeignFields(
        "annotations parsed",
        {
            "refusal": RefusedField("content has the text of an assistant"),
            "audio": TEXTS_ALONE,
            "function_call": RefusedField("tool_calls is the newer name"),
        },
    ),
    "a response": ForeignFields(
        "parallel_tool_calls max_tool_calls reasoning background_options access_programs",
        {
            "tools": RefusedField(CHAT_TOOLS),
            "tool_choice": RefusedField(CHAT_TOOLS, "auto"),
            "image": TEXTS_ALONE,
            "include": RefusedField("a response has its text alone"),
            "top_logprobs": RefusedField("/v1/chat/completions has log probabilities"),
            "background": STORED,
            "previous_response_id": STORED,
            "conversation": STORED,
            "prompt": STORED,
            "truncation": RefusedField(CUT, "disabled"),
            "context_management": RefusedField(CUT),
        },
    ),
}


def with_foreign(kind: str, base: type[BaseModel]) -> Any:
    return create_model(base.__name__, __base__=base, **FOREIGN[kind].fields())
