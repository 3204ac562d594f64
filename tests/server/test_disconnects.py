"""A client that leaves gives its slot back within one step, whatever it was waiting for."""

import json
import signal
import socket
import subprocess
import sys
import time

import pytest

from support.gate import Gate, Held
from support.http_client import head_of
from support.processes import read_to
from support.serving import until
from tinygpt import SamplingParams
from tinygpt.server.transport import endpoint

LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}


def expect_free_after_a_step(server, llm, gate) -> None:
    """The server has noticed; the step that was about to be taken then is the last."""
    ended = server.ended()
    assert (ended["status"], ended["finish"]) == (499, "abort")
    gate.allow(1)
    until(lambda: not llm.engine.scheduler.running and not llm.engine.scheduler.waiting)


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
    client.close()


def test_a_client_that_leaves_the_queue(server, llm, gate):
    others = [llm.submit([i], SamplingParams(max_tokens=400, ignore_eos=True)) for i in range(4)]
    gate.allow(1)
    gate.wait_until_asked(2)  # the first step may have come before the last of them
    client = server.begin(**LONG, stream=True)
    until(lambda: len(llm.engine.scheduler.waiting) == 1)
    client.close()
    ended = server.ended()
    assert (ended["status"], ended["finish"]) == (499, "abort")
    gate.allow(1)
    until(lambda: not llm.engine.scheduler.waiting)
    assert len(llm.engine.scheduler.running) == 4
    for future in others:
        future.cancel()
    gate.allow(1)


def test_a_client_that_leaves_in_the_prefill(server, llm, gate):
    """No token has been made, and none is sent."""
    client = server.begin(prompt=[262] * 400, max_tokens=10)
    gate.wait_until_asked(1)
    client.close()
    expect_free_after_a_step(server, llm, gate)
    assert gate.num_taken == 1


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_behind_a_long_body(server, llm, gate, is_streamed):
    """Of more than the connection reads ahead, behind a head that came alone: it has paused reading."""
    body = json.dumps({"model": "demo", **LONG, "stream": is_streamed, "user": "a" * 70_000}).encode()
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(head_of("/v1/completions", len(body)))
    time.sleep(0.2)
    client.sendall(body)
    gate.wait_until_asked(1)
    client.close()
    expect_free_after_a_step(server, llm, gate)


def test_a_client_that_leaves_while_its_body_is_read(server, llm, gate, monkeypatch):
    """In another thread, as one of some length is: nobody is told of the client then, and nothing is begun for it."""
    held = Held(endpoint.read_form)
    monkeypatch.setattr(endpoint, "read_form", held)
    client = server.begin(**LONG, user="a" * 10_000)
    held.called.wait()
    client.close()
    until(lambda: not server.num_connections)
    held.release.set()
    ended = server.ended()
    assert (ended["status"], ended.get("finish"), gate.num_asked) == (499, None, 0)


def test_a_client_that_is_killed(server, llm, gate):
    code = "import sys; sys.path[:0] = sys.argv[2:]; from support.http_client import RawRequest; " + (
        f"request = RawRequest(int(sys.argv[1]), '/v1/completions', {LONG | {'stream': True}!r}); "
        "print(next(request.events()), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(server.port), *sys.path]
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    gate.allow(2)
    read_to(client, client.stdout, "text_completion")
    client.send_signal(signal.SIGKILL)
    client.communicate()
    expect_free_after_a_step(server, llm, gate)


def test_others_go_on(server, llm, gate):
    """A neighbour's text is the same, whoever leaves beside it."""
    gate.allow(float("inf"))
    asked = {"prompt": "The king", "seed": 5, "max_tokens": 30}
    alone = server.complete(**asked).json["choices"]
    client = server.begin(**LONG, stream=True)
    next(client.events())
    stays = server.begin(**asked, stream=True)
    events = stays.events()
    texts = [next(events)["choices"][0]["text"]]
    client.reset()
    texts += [event["choices"][0]["text"] for event in events]
    stays.close()
    assert "".join(texts) == alone[0]["text"]
