"""How events get from the engine to a client: what is done once for a step, or a stream, is not done for each token."""

import pytest

pytest.importorskip("uvicorn", reason="uvicorn, of the extra `serve`, is not installed")

import asyncio
import json
import socket
from collections import Counter
from concurrent.futures import Future

from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from support.gate import Gate
from support.serving import served, until
from tinygpt.sampling_params import SamplingParams
from tinygpt.server.chat.template import ChatTemplate
from tinygpt.server.protocol.chat import ChatChunkChoice
from tinygpt.server.transport import connection, event_stream
from tinygpt.server.transport.gathering import GatheringTransport
from tinygpt.server.work.generation import Generation
from tinygpt.server.work.mailbox import Inbox

ASKED = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "ignore_eos": True, "stream": True}
CHAT = {name: value for name, value in ASKED.items() if name != "prompt"} | {
    "messages": [{"role": "user", "content": "Who is there?"}]
}


@pytest.fixture(scope="module")
def chat(llm):
    with served(llm, chat_template=ChatTemplate("{{ messages[0].content }}", {})) as server:
        yield lambda **body: server.ask("/v1/chat/completions", {**CHAT, **body})


def events_of(body: bytes) -> list[dict]:
    """The choices of a stream's events, which are made anew for each request but for these."""
    events = [part.removeprefix(b"data: ") for part in body.split(b"\n\n")]
    return [json.loads(event)["choices"] for event in events if event.startswith(b"{")]


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_only_the_ends_of_a_stream_go_through_all_layers(server, chat, monkeypatch, route):
    """A coroutine for each layer, and a task to wake, would take longer than a token's event."""
    sent, send = Counter(), RequestResponseCycle.send

    async def counted(self, message):
        sent[message["type"]] += 1
        await send(self, message)

    monkeypatch.setattr(RequestResponseCycle, "send", counted)
    reply = server.complete(**ASKED) if route == "completions" else chat()
    assert len(reply.events) > 10
    assert sent == {"http.response.start": 1, "http.response.body": 1}


@pytest.fixture
def parts(monkeypatch):
    """What the system is given of replies, each part by itself."""
    given = []

    class Noting:
        def __init__(self, transport):
            self._transport = transport

        def __getattr__(self, name):
            return getattr(self._transport, name)

        def write(self, data):
            given.append(bytes(data))
            self._transport.write(data)

    monkeypatch.setattr(connection, "GatheringTransport", lambda transport: GatheringTransport(Noting(transport)))
    return given


def test_the_head_goes_with_the_first_event_and_the_end_with_the_last(llm, server, parts):
    """To hand a part to the system takes as long as to write an event."""
    with llm.engine.wrapped(Gate) as gate:
        client = server.begin(**ASKED, stream_options={"include_usage": True})
        events = client.events()
        for count in range(1, ASKED["max_tokens"]):
            gate.allow(1)
            gate.wait_until_asked(count + 1)
            next(events)  # a text of each token
        assert parts[0].startswith(b"HTTP/1.1 200 OK\r\n")
        assert parts[0].count(b"data: ") == 1
        del parts[:]
        gate.allow(1)
        list(events)
        client.close()
    [end] = parts
    assert end.count(b"data: ") == 3  # the last token, the usage and [DONE]
    assert end.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_whole_reply_goes_as_one(server, parts):
    reply = server.complete(**ASKED | {"stream": False, "max_tokens": 1})
    [part] = parts
    assert part.endswith(reply.body)


def test_the_head_of_a_stream_that_has_no_event_yet_does_not_wait_long(llm, server, monkeypatch):
    monkeypatch.setattr(event_stream, "HEAD_SECONDS", 0.01)
    with llm.engine.wrapped(Gate) as gate:
        client = server.begin(**ASKED)
        assert client._lines.readline() == b"HTTP/1.1 200 OK\r\n"
        gate.allow(100)
        assert len(list(client.events())) > 10
        client.close()


def test_a_stream_is_one_task(llm, server):
    """To wait for its client, or for the time of a ping, is none's work."""

    def num_tasks() -> int:
        return asyncio.run_coroutine_threadsafe(_num_tasks(), server._server._loop).result(60)

    server.complete(**ASKED)  # and the models are built
    until(lambda: not server.num_connections)
    before = num_tasks()
    with llm.engine.wrapped(Gate) as gate:
        clients = [server.begin(**ASKED) for _ in range(3)]
        gate.wait_until_asked(1)
        until(lambda: len(llm.engine.scheduler.running) + len(llm.engine.scheduler.waiting) == 3)
        assert num_tasks() == before + 3
        gate.allow(100)
        for client in clients:
            list(client.events())
            client.close()


async def _num_tasks() -> int:
    return len(asyncio.all_tasks())


@pytest.mark.parametrize("asked", [{}, {"return_token_ids": True}, {"n": 2, "temperature": 1, "seed": 5}], ids=str)
def test_events_amid_a_chat_are_written_without_a_model_of_each(chat, monkeypatch, asked):
    made = []

    def counted(**fields):
        made.append(fields)
        return ChatChunkChoice(**fields)

    monkeypatch.setattr("tinygpt.server.chat.stream.ChatChunkChoice", counted)
    events = chat(**asked).events
    assert len(events) > len(made) == 2 * asked.get("n", 1)  # the first and the last
    for event in events:
        [choice] = event["choices"]
        assert ChatChunkChoice(**choice).model_dump(exclude_unset=True) == choice
    assert {tuple(event) for event in events} == {tuple(events[-1])}


def test_a_chat_has_what_stream_options_ask_for(chat):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = chat(max_tokens=3, stream_options=options).events
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 3, 3]
    lines = chat(stream_options={"include_obfuscation": True}).body.decode().split("\n\n")[:-2]
    assert {len(line + "\n\n") % 64 for line in lines} == {0}


def test_a_client_of_http_1_0_gets_the_same_events(server):
    """It knows no chunks: the body ends with the connection."""
    data = json.dumps(ASKED).encode()
    lines = ["POST /v1/completions HTTP/1.0", "host: localhost", "content-type: application/json"]
    with socket.create_connection(("127.0.0.1", server.port), 60) as client:
        client.sendall("\r\n".join([*lines, f"content-length: {len(data)}", "", ""]).encode() + data)
        head, _, body = client.makefile("rb").read().partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert body.endswith(b"data: [DONE]\n\n")
    assert events_of(body) == events_of(server.complete(**ASKED).body)


def test_behind_another_server_a_stream_is_the_same(server):
    """One that knows nothing of our connections, but for what ASGI says."""
    body = json.dumps(ASKED).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    expected = events_of(server.complete(**ASKED).body)
    loop = server._server._loop
    messages = asyncio.run_coroutine_threadsafe(answered(server.app, scope, body), loop).result(60)
    assert [message["type"] for message in messages[:1]] == ["http.response.start"]
    assert [message["more_body"] for message in messages[1:]] == [True] * (len(messages) - 2) + [False]
    told = b"".join(message["body"] for message in messages[1:])
    assert events_of(told) == expected


def test_behind_another_server_a_client_may_leave(llm, server):
    body = json.dumps(ASKED | {"stream": False}).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": body, "more_body": False}]

    async def asked():
        async def receive():
            if len(messages) == 1:
                await asyncio.to_thread(gate.wait_until_asked, 1)
            return messages.pop()

        await server.app(scope, receive, None)

    server.forget()
    with llm.engine.wrapped(Gate) as gate:
        asyncio.run_coroutine_threadsafe(asked(), server._server._loop).result(60)
        assert (server.ended()["status"], len(llm.engine.scheduler.running)) == (499, 1)
        gate.allow(1)
        until(lambda: not llm.engine.scheduler.running)


async def answered(app, scope, body: bytes) -> list[dict]:
    messages, asked = [], [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        return asked.pop() if asked else await asyncio.Event().wait()

    async def send(message):
        await asyncio.sleep(0)
        messages.append(message)

    await app(scope, receive, send)
    return messages


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_an_upgrade_is_not_taken_and_logs_no_advice(server, caplog, protocol):
    reply = server.ask("/health", connection="Upgrade", upgrade=protocol)
    assert (reply.status, reply.json) == (200, {"status": "ok"})
    assert [record.message for record in caplog.records if record.name.startswith("uvicorn")] == []


def test_what_has_read_a_stream_goes_with_it():
    """It knows the generation, which knows its inbox: such a ring would stay until garbage is looked for."""

    async def followed():
        generation = object.__new__(Generation)
        generation._futures, generation._inbox, generation._reason = [Future()], Inbox(), None
        generation._futures[0].set_result(None)
        generation._inbox.put((0, None))
        await generation.follow(lambda chunks, is_last: None)
        return generation._inbox._read

    read = asyncio.run(followed())
    assert read.__closure__ is None


def test_a_samples_first_token_and_the_end_are_urgent_and_no_other(llm):
    """All else may wait a while, so that the loop hands out several steps at once."""
    posted = []

    class Noting:
        def post(self, inbox, item, is_urgent=False):
            posted.append((item, is_urgent))

    async def generated():
        generation = Generation(llm, Noting())
        params = SamplingParams(max_tokens=5, n=2, temperature=0.5, ignore_eos=True)
        await generation.submit([("Once", params)], is_streamed=True)
        await asyncio.gather(*map(asyncio.wrap_future, generation._futures))

    asyncio.run(generated())
    samples = [[urgent for (_, chunk), urgent in posted if chunk and chunk.index == index] for index in (0, 1)]
    assert samples == [[True, False, False, False, False]] * 2
    assert [urgent for (_, chunk), urgent in posted if chunk is None] == [True]
