"""A client that sends more than a bound of its connection is refused, and nothing of it is kept."""

import re
import socket
import time

import pytest

from support.gate import Gate, noting
from support.paths import ROOT
from support.serving import served, until
from tinygpt.cli import serve
from tinygpt.engine import grammar_process, guided
from tinygpt.look import edits, hooks
from tinygpt.server import api, app, gate, monitoring, replies, turns
from tinygpt.server.config import ServerConfig

BOUNDS = {
    "path, headers": (gate.HEAD_BYTES >> 10, gate.NUM_HEADERS, gate.HEAD_SECONDS),
    "requests on": (gate.NUM_PIPELINED,),
    "a body": (
        ServerConfig.max_body_bytes >> 20,
        gate.BODY_SECONDS,
        gate.NUM_PIECES,
        gate.PIECE_BYTES,
        turns.HUGE >> 10,
    ),
    "bodies and": (
        turns.MAX_HELD >> 20,
        replies.BYTES_OF_LOGPROB,
        replies.BYTES_OF_VALUE,
        replies.BYTES_OF_VALUES,
        api.BYTES_OF_PROMPT,
    ),
    "a reply": (app.UNREAD_SECONDS, monitoring.MAX_UNREAD),
    "samples": (),
    "arrays": (serve.MAX_CAPTURED >> 20, edits.MAX_PLACED, hooks.MAX_PATTERNS, hooks.MAX_CHARACTERS),
    "grammars": (
        guided.MAX_GRAMMARS,
        turns.GRAMMAR_THREADS,
        grammar_process.MAX_BYTES >> 20,
        grammar_process.COMPILE_SECONDS,
    ),
}
HOST = b"Host: 127.0.0.1\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n" + HOST
KB = 2**10
LARGE = 2**25  # does not fit into the sockets' buffers
# What comes first, and what then comes without end.
ENDLESS = {
    "path": (b"GET /", b"a" * KB),
    "headers": (b"GET /health HTTP/1.1\r\n" + HOST, b"X-1: a\r\n" * KB),
    "large headers": (b"GET /health HTTP/1.1\r\n" + HOST, b"X-1: %s\r\n" % (b"a" * 2 * KB)),
    "a header": (b"GET /health HTTP/1.1\r\n" + HOST + b"X-1: ", b"a" * KB),
    "trailers": (CHUNKED + b"2\r\n{}\r\n0\r\n", b"X-1: a\r\n" * KB),
    "a trailer": (CHUNKED + b"2\r\n{}\r\n0\r\nX-1: ", b"a" * KB),
    "an extension of a chunk": (CHUNKED + b"2;a=", b"a" * KB),
    "requests": (b"", GET * KB),
    "chunks": (CHUNKED, b"1\r\na\r\n" * KB),
    "lines before a request": (b"", b"\r\n" * KB),
}


def test_the_list_of_what_is_kept_has_the_bounds():
    text = (ROOT / "tinygpt/server/README.md").read_text(encoding="utf-8")
    section = text.partition("## What a client can make it keep")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    found = {
        of: [float(n.replace(" ", "")) for n in re.findall(r"\d[\d ]*", bounds)] for of, bounds, _ in rows
    }
    assert [bounds for of, bounds in found.items()] == [[*map(float, bounds)] for bounds in BOUNDS.values()]
    assert all(of.startswith(name) for of, name in zip(found, BOUNDS, strict=True))


@pytest.fixture(scope="module")
def locked(llm):
    with served(llm, api_keys=("key",)) as server:
        yield server


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def received(client: socket.socket) -> bytes:
    found = b""
    while data := client.recv(2**16):
        found += data
    return found


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_has_no_end_is_cut(locked, kind):
    head, more = ENDLESS[kind]
    with connect(locked) as client:
        client.sendall(head)
        with pytest.raises(ConnectionError):
            client.sendall(more * (LARGE // len(more)))
    until(lambda: not locked._server.server_state.connections)


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"X-1: a\r\n" * (gate.NUM_HEADERS - 2), 200),
        (b"X-1: a\r\n" * gate.NUM_HEADERS, 431),
        (b"X-1: %s\r\n" % (b"a" * (gate.HEAD_BYTES - 50)), 200),
        (b"X-1: %s\r\n" % (b"a" * gate.HEAD_BYTES), 431),
    ],
)
def test_a_head_may_be_as_large_as_told(locked, lines, status):
    with connect(locked) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"Connection: close\r\n" + lines + b"\r\n")
        assert received(client).startswith(b"HTTP/1.1 %d" % status)


def test_requests_may_wait_for_others(locked):
    with connect(locked) as client:
        client.sendall(GET * gate.NUM_PIPELINED)
        found = b""
        while found.count(b"HTTP/1.1 200 OK") < gate.NUM_PIPELINED:
            found += client.recv(2**16)


def test_a_body_may_come_in_small_chunks(locked):
    body = b"".join(b"1\r\n%c\r\n" % c for c in b'{"prompt": "a", "max_tokens": 1}')
    with connect(locked) as client:
        head = CHUNKED.replace(
            HOST, HOST + b"Authorization: Bearer key\r\nContent-Type: application/json\r\n"
        )
        client.sendall(head.replace(HOST, HOST + b"Connection: close\r\n") + body + b"0\r\n\r\n")
        assert received(client).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHo", GET + b"GET /hea"])
def test_a_head_that_does_not_end(llm, monkeypatch, sent):
    monkeypatch.setattr("tinygpt.server.gate.HEAD_SECONDS", 0.2)
    with served(llm) as server, connect(server) as client:
        client.sendall(sent)
        assert received(client).startswith(b"HTTP/1.1 200 OK" if GET in sent else b"")


def test_a_body_that_does_not_end(llm, monkeypatch):
    monkeypatch.setattr("tinygpt.server.gate.BODY_SECONDS", 0.2)
    with served(llm) as server, connect(server) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n"
        client.sendall(head + b"Connection: close\r\n" + HOST + b"\r\n{")
        assert received(client).startswith(b"HTTP/1.1 408")


def test_a_reply_may_take_longer_than_a_head(llm, monkeypatch):
    monkeypatch.setattr("tinygpt.server.gate.HEAD_SECONDS", 0.2)
    with served(llm) as server, llm.engine.wrapped(Gate) as gate:
        client = server.begin(prompt="Once", max_tokens=1)
        gate.wait_until_asked(1)
        time.sleep(0.3)
        gate.allow(1)
        assert client.socket.recv(100).startswith(b"HTTP/1.1 200 OK")


def test_a_reply_that_waited_may_take_longer_than_a_head(llm, monkeypatch):
    monkeypatch.setattr("tinygpt.server.gate.HEAD_SECONDS", 0.2)
    body = b'{"prompt": "a", "max_tokens": 1}'
    with served(llm) as server, llm.engine.wrapped(Gate) as gate, connect(server) as client:
        client.sendall(GET + POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        gate.wait_until_asked(1)
        time.sleep(0.3)
        gate.allow(1)
        assert received(client).count(b"HTTP/1.1 200 OK") == 2


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"


@pytest.mark.parametrize("apart", [False, True])
def test_an_offer_to_upgrade_is_passed_over(server, apart):
    """Java's client and curl --http2 send it."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    with connect(server) as client:
        head = POST + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(body)
        last = GET.replace(HOST, HOST + b"Connection: close\r\n")
        for data in [head, body, last] if apart else [head + body + last]:
            client.sendall(data)
            time.sleep(0.1)
        assert received(client).count(b"HTTP/1.1 200 OK") == 2


def test_an_offer_to_upgrade_a_connection_that_closes_is_passed_over(server):
    body = b'{"prompt": "a", "max_tokens": 1}'
    with connect(server) as client:
        offer = b"Connection: Upgrade, close\r\nUpgrade: h2c\r\nContent-Length: %d\r\n\r\n"
        client.sendall(POST + offer % len(body) + body)
        assert received(client).count(b"HTTP/1.1 200 OK") == 1


def test_packets_of_a_body_are_not_counted_apart(server, monkeypatch):
    sizes = noting(monkeypatch, server.api.turns, "holding", lambda size: size)
    body = b'{"prompt": "a", "max_tokens": 1}'
    with connect(server) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        client.sendall(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
        for i in range(len(body)):
            client.sendall(body[i : i + 1])
            time.sleep(0.005)
        assert received(client).startswith(b"HTTP/1.1 200 OK")
    assert len(sizes) < 10
    assert sum(sizes) > len(body)


def test_packets_of_a_reply_do_not_wait_for_each_other():
    with app.listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
