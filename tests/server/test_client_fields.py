"""What OpenAI's clients send without asking for anything is passed over, and what this server writes it reads."""

import copy
import json

import pytest

from support.paths import ROOT
from support.serving import served
from tinygpt import LLM
from tinygpt.engine.json_schema import close
from tinygpt.errors import RequestError
from tinygpt.server import client_fields, protocol
from tinygpt.server.chats import ChatRequest, ResponsesRequest
from tinygpt.server.tool_calls import Function, ToolCall, schema_of
from tinygpt.text.chat_template import ChatTemplate

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = {"role": "user", "content": "Once upon a time"}
ASKED = {
    CHAT: {"messages": [USER], "max_tokens": 1},
    COMPLETIONS: {"prompt": "Once", "max_tokens": 1},
    RESPONSES: {"input": "Once", "max_output_tokens": 1},
}
ANY = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x"}
ANY |= {"prompt_cache_key": "x", "prompt_cache_retention": "24h"}
OF_CHAT = {"parallel_tool_calls": False, "reasoning_effort": "low", "verbosity": "low", "functions": []}
OF_CHAT |= {"modalities": ["text"], "audio": None, "prediction": None, "tools": [], "tool_choice": "none"}
OF_RESPONSE = {
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "low"},
}
OF_RESPONSE |= {"include": [], "truncation": "disabled", "background": False, "previous_response_id": None}
OF_RESPONSE |= {"text": {"format": {"type": "text"}, "verbosity": "low"}}
PASSED = [(path, ANY | more) for path, more in ((CHAT, OF_CHAT), (COMPLETIONS, {}), (RESPONSES, OF_RESPONSE))]
# Assistants' turns as programs send them, and what a template gets.
SILENT = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TURNS = [
    ({"content": "a", **SILENT, "reasoning_content": None}, {"content": "a"}),
    ({"content": None}, {"content": ""}),
    (
        {"tool_calls": [{**CALL, "index": 0}]},
        {"content": "", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {"x": 1}}}]},
    ),
]
COLOR = {"type": "object", "properties": {"color": {"$ref": "#/$defs/C"}}, "required": ["color"]}
COLOR |= {"$defs": {"C": {"enum": ["red", "blue"]}}}
TOOLS = [
    {"type": "function", "function": {"name": "paint", "description": "Paint it.", "parameters": COLOR}},
    {"type": "function", "function": {"name": "stop", "strict": True}},
]
CHOICES = ["required", {"type": "function", "function": {"name": "paint"}}]


@pytest.mark.parametrize(("path", "fields"), PASSED)
def test_what_asks_for_nothing_is_passed_over(server, path, fields):
    expected = server.ask(path, ASKED[path] | {"temperature": 0}).json
    for name, value in fields.items():
        reply = server.ask(path, ASKED[path] | {"temperature": 0, name: value})
        assert reply.status == 200, reply.body
        assert reply.json.get("choices") == expected.get("choices")


def test_the_tables_have_every_field_of_openais_client():
    pytest.importorskip("openai")
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chats
    from openai.types.responses import response_create_params as responses

    for of_client, form in (
        (completions.CompletionCreateParamsBase, protocol.CompletionRequest),
        (chats.CompletionCreateParamsBase, ChatRequest),
        (responses.ResponseCreateParamsBase, ResponsesRequest),
    ):
        assert of_client.__annotations__.keys() <= form.fields_by_name().keys()


def test_the_readme_has_the_table():
    lines = []
    for kind, foreign in client_fields.FOREIGN.items():
        reasons = {}
        for name, refused in foreign.refused.items():
            reasons.setdefault(refused.reason, []).append(f"`{name}`")
        told = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        lines.append(f"| {kind} | {', '.join(f'`{name}`' for name in foreign.passed.split())} | {told} |")
    text = (ROOT / "tinygpt" / "server" / "README.md").read_text(encoding="utf-8")
    assert "\n".join(lines) in text


@pytest.mark.parametrize(("sent", "read"), TURNS)
def test_an_assistants_turn_is_read(server, sent, read):
    message = {"role": "assistant", **sent}
    tool = {"role": "tool", "content": "1", "tool_call_id": "call_1"}
    form = ChatRequest(messages=[USER, message, tool])
    assert form.listed_messages() == [USER, {"role": "assistant", **read}, tool]
    assert server.ask(CHAT, {"messages": [USER, message, tool], "max_tokens": 1}).status == 200


def test_what_the_server_writes_it_reads(server):
    message = server.ask(CHAT, ASKED[CHAT]).choices[0]["message"]
    called = {"tools": TOOLS, "tool_choice": "required"}
    call = server.ask(CHAT, ASKED[CHAT] | {"max_tokens": 60} | called).choices[0]["message"]
    asked = {"messages": [USER, message, USER, call, USER], "max_tokens": 1}
    assert server.ask(CHAT, asked).status == 200
    output = server.ask(RESPONSES, ASKED[RESPONSES]).json["output"]
    assert server.ask(RESPONSES, {"input": [USER, *output, USER], "max_output_tokens": 1}).status == 200


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_forced_tool_is_called(server, choice):
    """Streamed as whole; the arguments fit the schema, with no other key."""
    asked = {"messages": [USER], "tools": TOOLS, "tool_choice": choice, "n": 2, "seed": 1, "max_tokens": 60}
    whole = server.ask(CHAT, asked)
    parts = server.ask(CHAT, {**asked, "stream": True}).parts
    for made in whole.choices:
        [call] = made["message"]["tool_calls"]
        assert (made["finish_reason"], made["message"]["content"]) == ("tool_calls", None)
        arguments = json.loads(call["function"]["arguments"])
        assert call["function"]["name"] in ("paint", "stop")
        assert (
            arguments == {} if call["function"]["name"] == "stop" else arguments["color"] in ("red", "blue")
        )
        mine = [part for part in parts if part["index"] == made["index"]]
        first, *more = [call for part in mine for call in part["delta"].get("tool_calls", [])]
        assert (first["type"], first["function"]["name"], first["index"]) == (
            "function",
            call["function"]["name"],
            0,
        )
        told = "".join(part["function"]["arguments"] for part in (first, *more))
        assert told == call["function"]["arguments"]
        assert mine[-1]["finish_reason"] == "tool_calls"


# What ends a forced call half way, and the finish reason that tells it.
CUTS = [({"max_tokens": 3}, "length"), ({"stop": '"color'}, "stop"), ({"stop": "}"}, "stop")]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize(("cut", "reason"), CUTS, ids=str)
def test_a_forced_call_that_is_cut_is_no_call(server, choice, cut, reason):
    tools = TOOLS[:1] if choice == "required" else TOOLS
    asked = {"messages": [USER], "tools": tools, "tool_choice": choice, "seed": 1, "max_tokens": 60, **cut}
    [made] = server.ask(CHAT, asked).choices
    assert made["finish_reason"] == reason
    assert "tool_calls" not in made["message"]
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(made["message"]["content"])
    assert server.ask(CHAT, {**asked, "stream": True}).parts[-1]["finish_reason"] == reason


def test_a_call_among_several_is_told_as_it_grows():
    text = '{ "name" : "paint", "arguments": {"a": {"b": "}}" } } }'
    call = ToolCall(["paint", "stop"])
    parts = [part["function"] for part in (call.add(each, False) for each in text) if part]
    parts.append(call.add("", True)["function"])
    assert [part["name"] for part in parts if "name" in part] == ["paint"]
    assert "".join(part["arguments"] for part in parts) == '{"a": {"b": "}}" } }'
    assert parts[8]["arguments"]  # long before the end


def test_a_schema_of_several_tools_keeps_each_ones_definitions(llm):
    other = {**COLOR, "$defs": {"C": {"enum": ["one", "two"]}}}
    schema = schema_of([Function(name="f", parameters=COLOR), Function(name="g", parameters=other)])
    texts = [
        llm.generate("a", guided_json=schema, seed=i, max_tokens=60)[0].outputs[0].text for i in range(6)
    ]
    for call in map(json.loads, texts):
        assert call["arguments"]["color"] in {"f": ["red", "blue"], "g": ["one", "two"]}[call["name"]]


def test_references_that_are_values_are_not_moved():
    data = {"const": {"$ref": "#/$defs/C"}}
    moved = {**COLOR, "properties": {**COLOR["properties"], "other": data}}
    schema = schema_of([Function(name="f"), Function(name="g", parameters=moved)])
    properties = schema["anyOf"][1]["properties"]["arguments"]["properties"]
    assert properties == {"color": {"$ref": "#/anyOf/1/properties/arguments/$defs/C"}, "other": data}


def test_a_responses_format_is_a_guide(server):
    form = {"type": "json_schema", "name": "x", "schema": COLOR, "strict": True}
    asked = {"input": "Once", "max_output_tokens": 60, "text": {"format": form}}
    found = server.ask(RESPONSES, asked).json
    assert json.loads(found["output"][0]["content"][0]["text"]) in ({"color": "red"}, {"color": "blue"})
    assert found["text"] == {"format": form}


def test_what_is_not_there_may_be_passed_over(server, llm):
    asked = {"audio": {"voice": "x"}, "moderation": {"model": "x"}, "tools": [{"type": "custom"}, *TOOLS]}
    for name, value in asked.items():
        reply = server.ask(CHAT, ASKED[CHAT] | {name: value})
        assert (reply.status, reply.error["param"].partition(".")[0]) == (400, name)
    with served(llm, unknown_fields="ignore") as server:
        assert server.ask(CHAT, ASKED[CHAT] | asked).choices[0]["finish_reason"] == "length"
        assert (
            server.ask(RESPONSES, ASKED[RESPONSES] | {"tools": TOOLS, "context_management": [{}]}).status
            == 200
        )


SHOWN = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}Once"
# A choice, and the prompt that a template with tools makes.
SHOWN_FOR = [
    (None, "paint stop Once"),
    ("auto", "paint stop Once"),
    ("none", "Once"),
    (CHOICES[1], "paint stop Once"),
]


@pytest.mark.parametrize(("choice", "prompt"), SHOWN_FOR, ids=str)
def test_a_template_shows_the_tools(llm, choice, prompt):
    asked = ASKED[CHAT] | {"tools": TOOLS, "tool_choice": choice, "return_token_ids": True, "max_tokens": 60}
    with served(llm, chat_template=ChatTemplate(SHOWN, {})) as server:
        reply = server.ask(CHAT, asked).json
    assert llm.tokenizer.decode(reply["prompt_token_ids"]) == prompt
    assert ("tool_calls" in reply["choices"][0]["message"]) == (choice == CHOICES[1])


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CHOICES[1]]}}


def test_of_allowed_tools_one_is_called(server):
    asked = ASKED[CHAT] | {"tools": TOOLS, "max_tokens": 60, "tool_choice": ALLOWED}
    [call] = server.ask(CHAT, asked).choices[0]["message"]["tool_calls"]
    assert call["function"]["name"] == "paint"
    reply = server.ask(CHAT, {**asked, "tools": TOOLS[1:]})
    assert reply.error["message"] == "tool_choice names 'paint', which is not among tools."


@pytest.mark.parametrize(
    "choice", [None, "auto", {**ALLOWED, "allowed_tools": {"mode": "auto", "tools": []}}]
)
def test_a_model_that_sees_no_tools_answers_with_a_text(server, llm, choice, caplog):
    asked = ASKED[CHAT] | {"temperature": 0, "max_tokens": 5}
    reply = server.ask(CHAT, asked | {"tools": TOOLS, "tool_choice": choice})
    assert reply.choices == server.ask(CHAT, asked).choices
    assert "sees no tools" in caplog.text
    with served(llm, strict_tools=True) as strict:
        assert (
            strict.ask(CHAT, asked | {"tools": TOOLS, "tool_choice": choice}).error["param"] == "tool_choice"
        )


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}])
def test_a_response_of_a_model_that_sees_no_tools_is_a_text(server, llm, choice, caplog):
    flat = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
    asked = {"input": "Once", "max_output_tokens": 5, "temperature": 0}
    tools = asked | {"tools": flat, **choice}
    text = server.ask(RESPONSES, asked).json["output"][0]["content"]
    assert server.ask(RESPONSES, tools).json["output"][0]["content"] == text
    assert ("sees no tools" in caplog.text) == (choice != {"tool_choice": "none"})
    forced = server.ask(RESPONSES, tools | {"tool_choice": "required"})
    assert (forced.status, forced.error["param"]) == (400, "tool_choice")
    shown = {"chat_template": ChatTemplate(SHOWN, {})}
    for config in ({"strict_tools": True}, shown):
        with served(llm, **config) as other:
            reply = other.ask(RESPONSES, tools)
            if "none" in choice.values():
                assert reply.status == 200
            else:
                assert (reply.status, reply.error["param"]) == (400, "tools")


def test_a_clients_word_for_any_model_is_any(server):
    reply = server.ask(CHAT, ASKED[CHAT] | {"model": "dummy"})
    assert (reply.status, reply.json["model"]) == (200, "demo")
    assert server.ask(CHAT, ASKED[CHAT] | {"model": "dumm"}).status == 404


def test_marks_for_a_cache_are_passed_over(server):
    mark = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "Once", **mark}
    tools = [{**TOOLS[0], **mark}]
    asked = {"messages": [{"role": "user", "content": [part], **mark}], "tools": tools, "max_tokens": 1}
    assert server.ask(CHAT, asked | {"num_ctx": 4096, "reasoning": {"effort": "low"}}).status == 200
    asked = {"input": [{"role": "user", "content": [{**part, "type": "input_text"}]}], "max_output_tokens": 1}
    assert server.ask(RESPONSES, asked).status == 200


def test_a_model_without_a_template_chats_by_the_plain_one(server, llm):
    prompt = {"prompt": USER["content"], "max_tokens": 6, "temperature": 0}
    reply = server.ask(CHAT, {"messages": [USER], "max_tokens": 6, "temperature": 0})
    assert reply.choices[0]["message"]["content"] == server.ask(COMPLETIONS, prompt).choices[0]["text"]
    assert [card["chat_template"] for card in server.ask("/v1/models").json["data"]] == ["plain", "plain"]


INTEGER = {"type": "integer"}
AN_OBJECT = {"type": "object", "properties": {"a": INTEGER}}
SHUT = AN_OBJECT | {"additionalProperties": False}
# A schema, and the closed one.
SCHEMAS = [
    (AN_OBJECT, SHUT),
    (AN_OBJECT | {"additionalProperties": INTEGER}, AN_OBJECT | {"additionalProperties": INTEGER}),
    ({"type": "object"}, {"type": "object"}),
    (
        {"anyOf": [AN_OBJECT, INTEGER], "$defs": {"b": AN_OBJECT}},
        {"anyOf": [SHUT, INTEGER], "$defs": {"b": SHUT}},
    ),
    (AN_OBJECT | {"anyOf": [{"required": ["a"]}]}, AN_OBJECT | {"anyOf": [{"required": ["a"]}]}),
    (
        {"properties": {"properties": INTEGER}},
        {"properties": {"properties": INTEGER}, "additionalProperties": False},
    ),
    ({"enum": [AN_OBJECT]}, {"enum": [AN_OBJECT]}),
]
# Closed, none of these would allow an object.
OPEN = [
    AN_OBJECT | {"required": ["a", "b"]},
    {"required": ["a"], "anyOf": [{"properties": {"b": INTEGER}}, {"properties": {"c": INTEGER}}]},
    AN_OBJECT
    | {"$ref": "#/$defs/base", "$defs": {"base": {"properties": {"b": INTEGER}, "required": ["b"]}}},
]
SCHEMAS += [(schema, schema) for schema in OPEN]


@pytest.mark.parametrize(("schema", "expected"), SCHEMAS)
def test_an_object_of_a_schema_is_closed(schema, expected):
    changed = copy.deepcopy(schema)
    close(changed)
    assert changed == expected


@pytest.mark.parametrize("is_open", [False, True])
def test_closed_and_open_schemas(small_demo, is_open):
    """Other keys may come only in an open one; conditions in allOf do not exclude each other."""
    two = {"guided_json": {**AN_OBJECT, "required": ["a"], "minProperties": 2}, "max_tokens": 9}
    both = {"allOf": [AN_OBJECT, {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]}]}
    with LLM(small_demo, open_schemas=is_open) as llm:
        assert '"b"' in llm.generate("a", guided_json=both, max_tokens=60)[0].outputs[0].text
        for schema in OPEN:
            llm.generate("a", guided_json=schema, max_tokens=1)
        if is_open:
            llm.generate("a", **two)
        else:
            with pytest.raises(RequestError, match="guided_json"):
                llm.generate("a", **two)
