"""Streams: wakes of the loop, usage, padding, pings, and other ASGI servers."""

import asyncio
import json
import socket

import pytest

from support.gate import Gate, Held
from support.serving import Reply, served, until
from support.tables import rows
from tinygpt.async_llm import Outbox
from tinygpt.server import monitoring, replies
from tinygpt.text.chat_template import ChatTemplate

ASKED = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "ignore_eos": True, "stream": True}


def choices_of(reply: Reply) -> list[list[dict]]:
    """By event: ids and times differ from request to request."""
    return [event["choices"] for event in reply.events]


def test_a_call_of_the_engine_wakes_the_loop_once(server, llm, monkeypatch):
    """A wake for each token of each stream would take the loop longer than to write its event."""
    woken = []
    wake = server.loop.call_soon_threadsafe

    def counted(call, *arguments):
        if getattr(call, "__func__", None) is Outbox._deliver:
            woken.append(call)
        return wake(call, *arguments)

    monkeypatch.setattr(server.loop, "call_soon_threadsafe", counted)
    reply = server.complete(**ASKED | {"temperature": 1, "seed": 1, "n": 4})
    num_tokens = sum(map(len, choices_of(reply)))
    assert num_tokens > 60
    assert 0 < len(woken) < num_tokens / 2


@pytest.mark.parametrize(
    ("path", "prompt", "counts"),
    rows("""
/v1/completions | {"prompt": "Once"} | [1, 2, 3, 3]
/v1/chat/completions | {"messages": [{"role": "user", "content": "Once"}]} | [0, 1, 2, 3, 3]
"""),
)
def test_a_stream_has_what_its_options_ask_for(llm, path, prompt, counts):
    body = {**prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True, "stream": True}
    with served(llm, chat_template=ChatTemplate("{{ messages[0].content }}", {})) as server:
        options = {"include_usage": True, "continuous_usage_stats": True}
        usages = [event["usage"] for event in server.ask(path, body | {"stream_options": options}).events]
        padded = server.ask(path, body | {"stream_options": {"include_obfuscation": True}})
    assert [usage["completion_tokens"] for usage in usages] == counts
    assert {usage["prompt_tokens"] for usage in usages} == {len(llm.tokenizer.encode("Once"))}
    assert {len(line + "\n\n") % 64 for line in padded.body.decode().split("\n\n")[:-2]} == {0}


def test_two_requests_of_one_connection_are_answered_in_their_order(server):
    bodies = [json.dumps(ASKED | {"seed": 1, "max_tokens": count}).encode() for count in (4, 2)]
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
    with socket.create_connection(("127.0.0.1", server.port), 60) as client:
        client.sendall(
            b"".join(head.encode() + str(len(body)).encode() + b"\r\n\r\n" + body for body in bodies)
        )
        read = client.makefile("rb")
        lines = []
        while lines.count(b"data: [DONE]\n") < 2:
            lines.append(read.readline())
    middle = lines.index(b"data: [DONE]\n")
    counts = [sum(line.startswith(b"data: {") for line in part) for part in (lines[:middle], lines[middle:])]
    assert counts == [4, 2]


@pytest.mark.parametrize(("path", "num_events"), [("/v1/completions", 20), ("/generate", 21)])
def test_a_silent_stream_is_kept_alive(server, llm, monkeypatch, path, num_events):
    monkeypatch.setattr(replies, "PING_SECONDS", 0.02)
    with llm.engine.wrapped(Gate) as gate:
        client = server.begin(path, **ASKED)
        while not client._lines.readline().startswith(b": ping"):
            pass
        gate.allow(100)
        assert len(list(client.events())) == num_events


async def answered(app, messages: list[dict], before_last=lambda: None) -> list[dict]:
    """Return what the app sends through plain ASGI. before_last: called in a thread before the last message."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "http_version": "1.1"}
    scope |= {"query_string": b"", "headers": headers}
    sent = []

    async def receive():
        if len(messages) == 1:
            await asyncio.to_thread(before_last)
        return messages.pop(0) if messages else await asyncio.Event().wait()

    async def send(message):
        await asyncio.sleep(0)
        sent.append(message)

    await app(scope, receive, send)
    return sent


def test_behind_another_server_a_stream_is_the_same(server):
    message = {"type": "http.request", "body": json.dumps(ASKED).encode(), "more_body": False}
    expected = choices_of(server.complete(**ASKED))
    loop = server.loop
    sent = asyncio.run_coroutine_threadsafe(answered(server.app, [message]), loop).result(60)
    assert sent[0]["type"] == "http.response.start"
    assert [each["more_body"] for each in sent[1:]] == [True] * (len(sent) - 2) + [False]
    assert choices_of(Reply(200, {}, b"".join(each["body"] for each in sent[1:]))) == expected


@pytest.mark.parametrize("is_streamed", [False, True])
def test_behind_another_server_a_client_may_leave(server, llm, is_streamed):
    body = json.dumps(ASKED | {"stream": is_streamed}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]
    server.forget()
    with llm.engine.wrapped(Gate) as gate:
        asked = answered(server.app, messages, lambda: gate.wait_until_asked(1))
        asyncio.run_coroutine_threadsafe(asked, server.loop).result(60)
        assert server.ended()["status"] == 499
        gate.allow(1)
        until(lambda: not llm.engine.scheduler.running)


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_an_upgrade_is_not_taken(server, protocol):
    reply = server.ask("/health", connection="Upgrade", upgrade=protocol)
    assert (reply.status, reply.json) == (200, {"status": "ok"})


def test_a_stream_that_is_not_read_ends_with_an_error(server, llm, monkeypatch):
    monkeypatch.setattr(monitoring, "MAX_UNREAD", 20)
    monkeypatch.setattr(monitoring, "UNREAD_SECONDS", 0)
    held = Held(lambda: None)
    client = server.begin(prompt="Once", max_tokens=200, n=2, ignore_eos=True, stream=True)
    events = client.events()
    next(events)
    server.loop.call_soon_threadsafe(held)
    until(lambda: not llm.engine.scheduler.running)
    held.release.set()
    *parts, last = events
    assert len(parts) < 200
    assert last["error"]["type"] == "invalid_request_error"
    assert "20 tokens of the stream" in last["error"]["message"]
