"""OpenAI's fields on which nothing here depends, and fields that may ask for a thing that is not there.

Models of requests and the README's table derive from these tables; fields that do something are in `protocol`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationInfo, create_model

DROPPING = "dropping"  # the context of a request whose refused fields are passed over
EMPTY = (None, False, 0, "", "none", [], {})  # what asks for nothing in any field


@dataclass(frozen=True)
class Lacking:
    """A field that is refused for this reason, but for EMPTY and a value that says what is so anyway."""

    reason: str
    usual: Any = None

    def check(self, value: Any, about: ValidationInfo) -> Any:
        """Return the value if it asks for nothing, and None for another one of a DROPPING request."""
        if value in EMPTY or value == self.usual:
            return value
        if about.context == DROPPING:
            return None
        raise ValueError(self.reason)


@dataclass(frozen=True)
class Others:
    """Fields of one model that are passed over, and fields that are refused unless they ask for nothing."""

    passed: str
    lacking: dict[str, Lacking]

    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            name: (Any, Field(None, description="Passed over.")) for name in self.passed.split()
        }
        for name, each in self.lacking.items():
            checked = Annotated[Any, AfterValidator(each.check)]
            found[name] = checked, Field(None, description=f"Nothing, as {each.reason}.")
        return found


TEXTS_ALONE = Lacking("texts alone are read and written here")
STORED = Lacking("nothing is stored here; send all messages")
CUT = 'send overflow, as "truncate"'
CHAT_TOOLS = "/v1/chat/completions calls tools, by a tool_choice that is forced"
OTHERS = {
    "any request": Others(
        "store metadata service_tier safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention",
        {"moderation": Lacking("no text is judged here")},
    ),
    "a chat": Others(
        "parallel_tool_calls reasoning_effort verbosity prediction",
        {
            "modalities": Lacking(TEXTS_ALONE.reason, ["text"]),
            "audio": TEXTS_ALONE,
            "functions": Lacking("tools is the newer name"),
            "function_call": Lacking("tool_choice is the newer name", "auto"),
            "web_search_options": Lacking("nothing is searched here"),
        },
    ),
    "a chat's message": Others(
        "annotations parsed",
        {
            "refusal": Lacking("content has the text of an assistant"),
            "audio": TEXTS_ALONE,
            "function_call": Lacking("tool_calls is the newer name"),
        },
    ),
    "a response": Others(
        "parallel_tool_calls max_tool_calls reasoning background_options access_programs",
        {
            "tools": Lacking(CHAT_TOOLS),
            "tool_choice": Lacking(CHAT_TOOLS, "auto"),
            "image": TEXTS_ALONE,
            "include": Lacking("a response has its text alone"),
            "top_logprobs": Lacking("/v1/chat/completions has log probabilities"),
            "background": STORED,
            "previous_response_id": STORED,
            "conversation": STORED,
            "prompt": STORED,
            "truncation": Lacking(CUT, "disabled"),
            "context_management": Lacking(CUT),
        },
    ),
}


def with_others(kind: str, base: type[BaseModel]) -> Any:
    return create_model(base.__name__, __base__=base, **OTHERS[kind].fields())


def table() -> Iterator[str]:
    """Yield the lines of the README's table."""
    for kind, others in OTHERS.items():
        reasons: dict[str, list[str]] = {}
        for name, each in others.lacking.items():
            reasons.setdefault(each.reason, []).append(f"`{name}`")
        refused = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        yield f"| {kind} | {', '.join(f'`{name}`' for name in others.passed.split())} | {refused} |"
