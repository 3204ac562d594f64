"""Clients that neither ask nor read, nor send what they have announced: given up, and nobody waits for them."""

import pytest

pytest.importorskip("uvicorn", reason="uvicorn, of the extra `serve`, is not installed")

import socket

from support.http_client import head_of
from support.serving import served, until
from tinygpt.server.config import ServerConfig
from tinygpt.server.transport import connection, endpoint, event_stream, rest_of_body
from tinygpt.server.transport.connection import Connection

SOON = 0.05  # seconds that clients have in these tests


@pytest.fixture
def impatient(llm, monkeypatch):
    monkeypatch.setattr(connection, "PATIENCE", SOON)
    with served(llm) as server:
        yield server


def connect(server, data: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), 60)
    client.sendall(data)
    return client


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: 127."], ids=["nothing", "half a head"])
def test_a_client_that_asks_nothing(impatient, sent):
    with connect(impatient, sent) as client:
        assert client.recv(1) == b""


def test_a_client_that_is_slow_to_ask_again(impatient):
    with connect(impatient, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as client:
        reader = client.makefile("rb")
        while reader.readline() != b"\r\n":
            pass
        reader.read(len(b'{"status":"ok"}'))
        client.sendall(b"GET /health HTT")
        assert reader.read(1) == b""


def test_a_client_that_goes_on_with_a_body_that_was_refused(impatient):
    with connect(impatient, head_of("/v1/completions", 10**12)) as client, pytest.raises(ConnectionError):
        send_on(client)


@pytest.mark.parametrize("lines", [["connection: close"], ["Connection: close, TE", "te: trailers"], []])
@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere"])
def test_one_that_sends_all_before_it_reads_gets_the_reply(server, path, lines):
    """Where it has asked for an end of the connection, too: to close with bytes unread is a reset."""
    body = bytes(2 * ServerConfig.max_body_bytes)
    with connect(server) as client:
        client.sendall(head_of(path, len(body), *lines) + body)
        status = 413 if path == "/v1/completions" else 404
        reader = client.makefile("rb")
        assert reader.readline().split()[1] == b"%d" % status
        if lines:
            assert reader.read().endswith(b"}")  # whole, and the connection ends


def test_one_that_speaks_http_1_0_gets_the_reply_too(server):
    body = bytes(2 * ServerConfig.max_body_bytes)
    with connect(server) as client:
        client.sendall(head_of("/v1/completions", len(body)).replace(b"HTTP/1.1", b"HTTP/1.0") + body)
        assert b"413" in client.makefile("rb").readline()


def test_one_that_never_ends_a_body_is_not_heard_for_ever(server, monkeypatch):
    monkeypatch.setattr(rest_of_body, "PATIENCE", SOON)
    with connect(server, head_of("/v1/completions", 10**12, "connection: close")) as client:
        assert client.makefile("rb").read().endswith(b"}")
        with pytest.raises(ConnectionError):
            send_on(client)


def send_on(client) -> None:
    for _ in range(2**15):
        client.sendall(bytes(2**16))


def test_a_body_that_does_not_arrive(server, monkeypatch):
    monkeypatch.setattr(endpoint, "BODY_SECONDS", SOON)
    with connect(server, head_of("/v1/completions", 100) + b"{") as client:
        assert client.makefile("rb").readline() == b"HTTP/1.1 408 Request Timeout\r\n"


def test_a_client_that_does_not_read(impatient):
    """However long it keeps the connection. The reply has some megabytes, more than sockets hold for a reader."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    client.connect(("127.0.0.1", impatient.port))
    body = b'{"return_token_strs": true, "prompt": "%s"}' % (b"1 2 " * 250_000)
    client.sendall(head_of("/tokenize", len(body)) + body)
    impatient.ended("/tokenize")
    until(lambda: impatient.num_connections == 0)
    client.close()


class Transport:
    def __init__(self, waiting: int):
        self.waiting = waiting

    def get_write_buffer_size(self) -> int:
        return self.waiting


def test_a_client_that_reads_slowly_is_not_given_up(monkeypatch):
    """What a stream has made waits in memory, so that there may be no room for as long as he reads."""
    slow = object.__new__(Connection)
    slow.transport, slow._full_since, slow._num_written, slow._num_taken = Transport(900), 0.0, 1000, 0
    monkeypatch.setattr(connection.time, "monotonic", lambda: 1e6)
    assert not slow._is_stuck()
    slow.transport.waiting = 899
    assert not slow._is_stuck()
    slow._num_written, slow.transport.waiting = 1500, 1399
    assert slow._is_stuck()


def test_steps_do_not_wait_for_a_reader(server):
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    client.connect(("127.0.0.1", server.port))
    body = b'{"prompt": "Once", "max_tokens": 500, "ignore_eos": true, "seed": 1, "logprobs": 20, "stream": true}'
    client.sendall(head_of("/v1/completions", len(body)) + body)
    assert server.complete(prompt="The king", max_tokens=50, ignore_eos=True).json["usage"]["completion_tokens"] == 50
    client.close()


def test_a_stream_that_waits_is_kept_alive(server, llm, monkeypatch):
    from support.gate import Gate

    monkeypatch.setattr(event_stream, "PING_SECONDS", SOON)
    with llm.engine.wrapped(Gate) as gate:
        client = server.begin(prompt="Once", max_tokens=2, temperature=0, stream=True)
        line = b""
        while line != b": ping\n":
            line = client._lines.readline()
        gate.allow(100)
        assert [event["choices"][0]["index"] for event in client.events()] == [0, 0]
        client.close()
