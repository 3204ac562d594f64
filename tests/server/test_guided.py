"""Guided texts over HTTP: by each of the names that clients know them by, the library's to the bit."""

import pytest

pytest.importorskip("llguidance", reason="llguidance, the extra `guided`, is not installed")

import json
import sys
import threading

from support.gate import Gate, Held, noting, until_idle
from support.processes import readable
from support.serving import served
from support.tables import rows
from tinygpt.engine import grammar_process
from tinygpt.engine.guided import Guidance
from tinygpt.errors import RequestError, how_to_install
from tinygpt.server.turns import GRAMMAR_THREADS
from tinygpt.text.chat_template import ChatTemplate

PROMPT = "In the house lived"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEX = "[A-Z][a-z]{2,8} [0-9]{1,2}"
CHOICES = ["a king", "a wolf"]
GRAMMAR = 'start: "(" start ")"|"here"'
SAMPLED = {"max_tokens": 60, "temperature": 0.9, "seed": 3}


# What a client sends, and the field of SamplingParams that it is.
SPELLINGS = """
{"guided_choice": CHOICES} | {"guided_choice": CHOICES}
{"guided_regex": REGEX} | {"guided_regex": REGEX}
{"guided_json": PERSON} | {"guided_json": PERSON}
{"guided_json": TEXT} | {"guided_json": PERSON}
{"guided_grammar": GRAMMAR} | {"guided_grammar": GRAMMAR}
{"structured_outputs": {"choice": CHOICES}} | {"guided_choice": CHOICES}
{"structured_outputs": {"regex": REGEX, "disable_fallback": false, "structural_tag": null}} | {"guided_regex": REGEX}
{"structured_outputs": {"json": PERSON, "regex": null}} | {"guided_json": PERSON}
{"structured_outputs": {"json_object": true}} | {"guided_json": {"type": "object"}}
{"structured_outputs": {"grammar": GRAMMAR}} | {"guided_grammar": GRAMMAR}
{"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PERSON, "strict": true}}}
  | {"guided_json": PERSON}
{"response_format": {"type": "json_object"}} | {"guided_json": {"type": "object"}}
{"response_format": {"type": "json_object", "value": PERSON}} | {"guided_json": PERSON}
{"response_format": {"type": "json", "value": PERSON}} | {"guided_json": PERSON}
{"response_format": {"type": "json_object", "schema": PERSON}} | {"guided_json": PERSON}
{"response_format": {"type": "json_object", "schema": PERSON, "value": PERSON}} | {"guided_json": PERSON}
{"response_format": {"type": "json_object", "schema": null}} | {"guided_json": {"type": "object"}}
{"response_format": {"type": "text"}} | {}
{"structured_outputs": {"json_object": false}, "guided_json": null} | {}
"""
GUIDES = {
    "CHOICES": CHOICES,
    "REGEX": REGEX,
    "PERSON": PERSON,
    "GRAMMAR": GRAMMAR,
    "TEXT": json.dumps(PERSON),
}
for name, value in GUIDES.items():
    SPELLINGS = SPELLINGS.replace(name, json.dumps(value))
# The field that a refusal names, and a body.
REFUSED = rows("""
guided_regex | {"guided_regex": "("}
guided_json | {"guided_json": {"type": "bogus"}}
guided_grammar | {"guided_grammar": "start: nowhere"}
structured_outputs.regex | {"structured_outputs": {"regex": "("}}
response_format | {"response_format": {"type": "json", "value": {"type": "bogus"}}}
response_format | {"response_format": {"type": "json_object", "value": {"type": "string"},
  "schema": {"type": "object"}}}
response_format.json_schema.schema | {"response_format": {"type": "json_schema",
  "json_schema": {"name": "x", "schema": {"type": "bogus"}}}}
""")
REFUSED.append(("guided_regex", {"guided_regex": "a" * 65_537}))


@pytest.fixture(scope="module")
def chatting(llm):
    template = ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}", {})
    with served(llm, chat_template=template) as server:
        yield server


def asked_in(chatting, path, body, **more):
    prompt = (
        {"prompt": PROMPT}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": PROMPT}]}
    )
    return chatting.ask(path, {**prompt, **SAMPLED, **body, **more})


both_paths = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])


@both_paths
@pytest.mark.parametrize(("sent", "field"), rows(SPELLINGS), ids=lambda value: str(value)[:60])
def test_each_spelling_is_the_librarys_field(chatting, llm, sent, field, path):
    [expected] = llm.generate(PROMPT, **SAMPLED, **field)[0].outputs
    [choice] = asked_in(chatting, path, sent).json["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert (text, choice["stop_reason"]) == (expected.text, expected.stop_reason)
    parts = [event["choices"][0] for event in asked_in(chatting, path, sent, stream=True).events]
    assert "".join(part.get("text", part.get("delta", {}).get("content", "")) for part in parts) == text
    assert parts[-1]["finish_reason"] == expected.finish_reason


@both_paths
@pytest.mark.parametrize(("field", "body"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_bad_guide_is_refused_with_the_clients_field(chatting, field, body, path):
    reply = asked_in(chatting, path, body, stream=path == "/v1/completions")
    assert (reply.status, reply.error["param"]) == (400, field)


def test_a_bad_guide_is_refused_without_new_tokens(server):
    reply = server.complete(prompt="a", max_tokens=0, stream=True, structured_outputs={"regex": "("})
    assert (reply.status, reply.error["param"]) == (400, "structured_outputs.regex")


def test_without_the_package_the_sentence_says_so(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    bodies = {  # that no test has asked for, or they would be known already
        "guided_regex": {"guided_regex": "x7+"},
        "structured_outputs.json": {"structured_outputs": {"json": {"title": "Nobody's"}}},
    }
    for field, body in bodies.items():
        reply = server.complete(prompt="a", **body)
        assert (reply.status, reply.error["param"]) == (400, field)
        assert how_to_install("guided") in reply.error["message"]


@both_paths
def test_a_step_beyond_the_limits_ends_its_request_alone(chatting, monkeypatch, path):
    monkeypatch.setattr(grammar_process, "STEP_SECONDS", 0.1)
    good = chatting.begin(prompt=PROMPT, max_tokens=200, stream=True, ignore_eos=True)
    reply = asked_in(chatting, path, {"guided_regex": "x{30}" + "a?" * 10_000 + "a" * 10_000})
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert reply.error["message"].endswith("it takes more than 0.1 s or 256 MiB.")
    assert [*good.events()][-1]["choices"][0]["finish_reason"] == "length"


@pytest.fixture
def compiling(monkeypatch):
    """Grammars are compiled when it is released."""
    held = Held(Guidance.check)
    monkeypatch.setattr(Guidance, "check", lambda *given: held(*given))
    yield held
    held.release.set()


@pytest.mark.parametrize("max_tokens", [0, 16])
def test_a_guide_is_checked_in_a_thread(server, monkeypatch, max_tokens):
    in_loop = noting(monkeypatch, Guidance, "check", lambda *_: threading.current_thread() is server.thread)
    assert server.complete(prompt=PROMPT, guided_choice=CHOICES, max_tokens=max_tokens).status == 200
    assert set(in_loop) == {False}


def test_others_are_served_while_a_grammar_is_compiled(server, compiling):
    client = server.begin(prompt=PROMPT, guided_choice=CHOICES, stream=True)
    assert compiling.called.wait(60)
    assert server.complete(prompt="Once", max_tokens=2).status == 200
    compiling.release.set()
    assert "".join(event["choices"][0]["text"] for event in client.events()) in CHOICES


def test_a_client_that_leaves_while_its_grammar_is_compiled(server, llm, compiling):
    with llm.engine.wrapped(Gate) as gate:
        client = server.begin(prompt=PROMPT, guided_regex="[a-z ]+", max_tokens=400)
        assert compiling.called.wait(60)
        client.close()
        compiling.release.set()
        while server.ended()["status"] != 499:  # what others asked for may be logged only now
            pass
        gate.allow(1)
        until_idle(llm)


@pytest.fixture
def endless(monkeypatch):
    """The check of the expression x waits until the test has ended, and then refuses it."""

    def refuse(*given):
        raise RequestError("is refused.", "guided_regex")

    check = Guidance.check
    held = Held(refuse)
    monkeypatch.setattr(Guidance, "check", lambda *given: (held if given[2] == "x" else check)(*given))
    yield held.called
    held.release.set()


def test_endless_grammars_hold_up_no_other_request(server, endless):
    clients = [
        server.begin(prompt=PROMPT, guided_regex="x") for _ in range(40)
    ]  # asyncio has 32 threads at most
    assert endless.wait(60)
    for path, body in (
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "user": "x" * 9000}),
        ("/v1/embeddings", {"input": PROMPT}),
        ("/tokenize", {"prompt": PROMPT}),
        ("/detokenize", {"tokens": [1]}),
    ):
        assert server.ask(path, body).status == 200
    for client in clients:
        client.close()
    server.forget()


def test_a_grammar_is_served_next_to_endless_ones(server, endless):
    clients = [server.begin(prompt=PROMPT, guided_regex="x") for _ in range(GRAMMAR_THREADS - 1)]
    assert endless.wait(60)
    assert server.complete(prompt=PROMPT, guided_choice=CHOICES).status == 200
    assert not readable(client.socket for client in clients)
    for client in clients:
        client.close()
    server.forget()


def test_requests_end_with_the_server_while_their_grammars_are_checked(llm, endless):
    with served(llm, drain_seconds=0.05) as server:
        clients = [server.begin(prompt=PROMPT, guided_regex="x") for _ in range(4)]
        assert endless.wait(60)
        server.terminate()
        for client in clients:
            assert client.socket.recv(1000).startswith(b"HTTP/1.1 503")
            client.close()
        server.thread.join(60)
        assert not server.thread.is_alive()
