"""A client that leaves gives its slot back within one step, whatever it was waiting for."""

import gc
import socket
import weakref

import pytest

from support.gate import Gate, noting, until_idle
from support.serving import served, until
from tinygpt.look.captures import StepCaptures
from tinygpt.server import app
from tinygpt.server.gate import Connection
from tinygpt.server.monitoring import RunningRequest

LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}


def expect_free_after_a_step(server, llm, gate) -> None:
    """The server has noticed; the step that was about to be taken then is the last."""
    ended = server.ended()
    assert (ended["status"], ended["finish"]) == (499, "abort")
    gate.allow(1)
    until_idle(llm)


@pytest.fixture
def gate(server, llm):
    server.forget()
    with llm.engine.wrapped(Gate) as gate:
        yield gate


@pytest.mark.parametrize("leave", ["close", "reset", "half_close"])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves(server, llm, gate, leave, is_streamed):
    client = server.begin(**LONG, stream=is_streamed, n=2, seed=1)
    gate.allow(3)
    gate.wait_until_asked(4)
    if is_streamed:
        assert next(client.events())["choices"]
    getattr(client, leave)()
    expect_free_after_a_step(server, llm, gate)


def test_a_client_that_leaves_the_queue(server, llm, gate):
    others = [llm.submit([i], max_tokens=400, ignore_eos=True) for i in range(4)]
    gate.allow(1)
    gate.wait_until_asked(2)  # the first step may have come before the last of them
    client = server.begin(**LONG, stream=True)
    until(lambda: llm.engine._inbox.qsize() == 1)
    gate.allow(1)
    gate.wait_until_asked(3)
    assert len(llm.engine.scheduler.waiting) == 1
    client.close()
    ended = server.ended()
    assert (ended["status"], ended["finish"], ended["completion_tokens"], ended["ttft"]) == (
        499,
        "abort",
        0,
        None,
    )
    assert ended["queue"] > 0
    gate.allow(1)
    until(lambda: not llm.engine.scheduler.waiting)
    assert len(llm.engine.scheduler.running) == 4
    for future in others:
        future.cancel()
    gate.allow(1)


def test_a_client_that_leaves_in_the_prefill(server, llm, gate):
    client = server.begin(prompt=[262] * 400, max_tokens=10)
    gate.wait_until_asked(1)
    client.close()
    expect_free_after_a_step(server, llm, gate)
    assert gate.num_taken == 1


def test_others_go_on(server, llm, gate):
    gate.allow(float("inf"))
    asked = {"prompt": "The king", "seed": 5, "max_tokens": 30}
    alone = server.complete(**asked).choices
    client = server.begin(**LONG, stream=True)
    next(client.events())
    stays = server.begin(**asked, stream=True)
    events = stays.events()
    texts = [next(events)["choices"][0]["text"]]
    client.reset()
    texts += [event["choices"][0]["text"] for event in events]
    assert "".join(texts) == alone[0]["text"]


@pytest.mark.skipif(
    not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no limit for unread replies"
)
def test_a_reply_that_is_not_read_is_dropped(llm, monkeypatch):
    monkeypatch.setattr(app, "UNREAD_SECONDS", 0.2)
    with served(llm) as server:
        connections = server._server.server_state.connections
        server.begin("/tokenize", prompt="word " * 400_000, return_token_strs=True)
        until(lambda: server.api.turns.held_bytes)
        assert server.ended()["status"] == 200
        until(lambda: not connections)
        assert server.api.turns.held_bytes == 0


@pytest.mark.parametrize(
    "asked",
    [
        {"stream": True, "capture": "z"},
        {"edits": [{"name": "v", "keep": 3e38}] * 2},
        {"guided_regex": "("},
    ],
    ids=str,
)
def test_an_ended_request_is_free_before_a_garbage_collection(llm, monkeypatch, asked):
    """Else a collection of old objects, minutes later, would free its captures and texts."""
    owners = (RunningRequest, "begin"), (StepCaptures, "check"), (Connection, "data_received")
    made = [noting(monkeypatch, *owner, lambda owner, *_: weakref.ref(owner)) for owner in owners]
    with served(llm, look=True) as server:
        gc.disable()
        try:
            client = server.begin(**LONG | asked)
            client.socket.recv(1)
            client.close()
            server.ended()
            server.complete(prompt="x", max_tokens=1)  # the engine's thread has its last command
            until(lambda: not any(each() for some in made for each in some))
        finally:
            gc.enable()
