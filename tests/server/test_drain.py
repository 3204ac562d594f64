"""SIGTERM: no new work, what runs may finish, and what does not is told so; then exit status 0."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from support.gate import Gate
from support.paths import ROOT
from support.processes import read_to
from support.serving import RawRequest, ask, served, until
from support.tables import rows
from tinygpt.server import app
from tinygpt.server.app import allow_all_descriptors

LONG = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True, "seed": 1}


def test_what_runs_is_finished_and_new_clients_are_told_to_ask_elsewhere(llm, caplog):
    caplog.set_level("INFO", "tinygpt.server")
    with served(llm) as server, llm.engine.wrapped(Gate) as gate:
        idle = socket.create_connection(("127.0.0.1", server.port), 60)  # has not asked, and holds up nothing
        stream = server.begin(**LONG, stream=True)
        plain = server.begin(**LONG)
        until(lambda: len(server.api._running) == 2)
        gate.allow(2)
        events = stream.events()
        next(events)
        server.terminate()
        for _ in range(10):  # for longer than uvicorn takes to notice
            health = server.ask("/health")
            reply = server.complete(prompt="a")
            assert (health.status, health.json, reply.status) == (503, {"status": "draining"}, 503)
            assert (health.headers["connection"], reply.headers["connection"]) == ("close", "close")
            assert reply.headers["retry-after"] == "1"
            time.sleep(0.05)
        [said] = [
            each for each in caplog.records if each.name == "tinygpt.server" and hasattr(each, "fields")
        ]
        assert (said.fields["running"] >= 2, said.fields["drain_seconds"]) == (True, 60.0)
        assert "a second signal" in said.message
        gate.allow(float("inf"))
        assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
        assert b"200 OK" in plain.socket.recv(100)
        server.thread.join(60)
        assert not server.thread.is_alive()
        with pytest.raises(
            (ConnectionRefusedError, ConnectionResetError)
        ):  # reset: in the queue at the close
            socket.create_connection(("127.0.0.1", server.port), 60)
        idle.close()


def test_at_the_deadline_streams_end_with_an_event_that_says_so(llm):
    with served(llm, drain_seconds=0.05) as server, llm.engine.wrapped(Gate) as gate:
        stream = server.begin(**LONG, stream=True)
        plain = server.begin(**LONG)
        gate.allow(2)
        events = stream.events()
        next(events)
        server.terminate()
        *_, last = events
        assert last["error"]["code"] == "shutting_down"
        reply = plain.socket.recv(1000)
        assert reply.startswith(b"HTTP/1.1 503")
        gate.allow(1)
        server.thread.join(60)
        assert not server.thread.is_alive()


@contextmanager
def process(*arguments):
    command = [sys.executable, "-m", "tinygpt", "serve", "--port", "0", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True) as started:
        try:
            said = read_to(started, started.stderr, "serving")
            yield started, int(re.search(r"serving demo on http://127\.0\.0\.1:(\d+)", said)[1])
        finally:
            started.kill()


def test_a_signal_ends_the_process_with_status_0_and_a_second_one_at_once():
    """One process that has nothing to do, by Ctrl-C, and one that would go on for its 100 seconds."""
    busy_flags = ("--drain-seconds", "100", "--log-format", "json")
    with process() as (idle, idle_port), process(*busy_flags) as (busy, port):
        assert ask(idle_port, "/health").json == {"status": "ok"}
        client = RawRequest(port, "/v1/completions", {**LONG, "max_tokens": 500, "n": 100, "stream": True})
        next(client.events())
        idle.send_signal(signal.SIGINT)
        _, log = idle.communicate(timeout=60)
        assert (idle.returncode, log.endswith("INFO the server has ended\n")) == (0, True)
        busy.send_signal(signal.SIGTERM)
        until(lambda: ask(port, "/health").status == 503)
        busy.send_signal(signal.SIGTERM)
        _, log = busy.communicate(timeout=60)
        assert (busy.returncode, "the server has ended" in log) == (128 + signal.SIGTERM, False)
        client.close()


WORK = rows("""
/v1/completions | {"prompt": "a", "max_tokens": 1, "echo": true, "logprobs": 1}
/generate | {"prompt": "a", "max_tokens": 1}
/v1/embeddings | {"input": "a"}
/v1/score | {"text_1": "a", "text_2": "b"}
/score_continuations | {"prompt": "a", "continuations": ["b"]}
""")


@pytest.mark.parametrize(("path", "body"), WORK)
def test_work_of_all_kinds_is_refused_before_its_prompt_is_read(llm, monkeypatch, path, body):
    with served(llm) as server:
        assert server.ask(path, body).status == 200
        server.api.is_draining = True
        monkeypatch.setattr(llm, "read_prompt", None)
        reply = server.ask(path, body)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("ends", [True, False])
def test_at_the_deadline_embeddings_end_with_a_reply_that_says_so(llm, monkeypatch, ends):
    """ends: the step does before the reply."""
    monkeypatch.setattr(app, "FLUSH_SECONDS", 0.1)
    with served(llm, drain_seconds=0.05) as server, llm.engine.wrapped(Gate) as gate:
        client = server.begin("/v1/embeddings", input=["a"] * 9)
        gate.wait_until_asked(1)
        server.terminate()
        until(lambda: server.api.turns.shutdown_error)
        if ends:
            gate.allow(1)
        assert client.socket.recv(1000).startswith(b"HTTP/1.1 503")
        gate.allow(1)


STUCK = """
import asyncio, os, signal, time, types
from fastapi import FastAPI
from tinygpt.server import app

def begin():
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 100)
    os.kill(os.getpid(), signal.SIGTERM)

app.FLUSH_SECONDS = app.END_SECONDS = 0.1
stuck = FastAPI()
stuck.state.api = types.SimpleNamespace(stop_all=lambda: None)
app.serve(stuck, app.listen("127.0.0.1", 0), 0.1, begin)
"""


def test_a_thread_that_does_not_end_cannot_keep_the_process():
    assert (
        subprocess.run([sys.executable, "-c", STUCK], env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode
        == 1
    )


def test_connections_may_take_all_descriptors_that_the_system_allows():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 1, before[1]))
    try:
        allow_all_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
