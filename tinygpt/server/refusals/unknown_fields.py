"""hint_for: what to say of a field that a form does not have, where anything near in meaning is known."""

from inspect import signature

from tinygpt.errors import suggest
from tinygpt.llm import LLM
from tinygpt.server.protocol.fields import Strict

# A field, what more to say of it, and how other servers call it.
MEANT = (
    ("temperature", " 0 is greedy, and all above it draws", "do_sample sample greedy"),
    ("user", "", "user_id safety_identifier"),
    ("messages", "", "prompt input inputs"),
    ("prompt", "", "input inputs"),
    ("input", "", "prompt inputs text texts"),
)
# Why there is none -> what it is called elsewhere.
WITHOUT = {
    "messages are for /v1/chat/completions": "messages",
    "nothing is stored: leave it out": "store metadata",
    "the model calls no functions: leave it out": "functions function_call tools tool_choice parallel_tool_calls",
    "the model does not reason: leave it out": "reasoning_effort include_reasoning verbosity",
    "the model reads and writes texts alone: leave it out": "modalities audio prediction web_search_options images",
    "all requests are served alike: leave it out": "service_tier priority",
    "prompts share what they begin with anyway: leave it out": "prompt_cache_key prompt_cache_retention cache_prompt",
    "special tokens have no text: leave it out": "skip_special_tokens spaces_between_special_tokens",
    "the checkpoint says which token that is: leave it out": "bos_token_id forced_bos_token_id decoder_start_token_id",
}
_OF_THE_START = signature(LLM).parameters.keys()


def hint_for(name: str, form: type[Strict]) -> str | None:
    """name: as the client has written it; form: that has no such field."""
    names = [field.alias or name for name, field in form.model_fields.items()]
    for field, more, others in MEANT:
        if field in names and name in others.split():
            return f"did you mean {field}?{more}"
    if why := next((why for why, others in WITHOUT.items() if name in others.split()), None):
        return why
    if name in _OF_THE_START:
        return f"{name} is decided when the server starts: leave it out"
    return suggest(name, names).removeprefix("; ") or None
