"""Requests that a client sends by one connection before it has the reply to the first."""

import pytest

pytest.importorskip("uvicorn", reason="uvicorn, of the extra `serve`, is not installed")

import json
import socket
from typing import Any, BinaryIO

from support.gate import Gate
from support.http_client import SECONDS, Reply, head_of
from support.serving import until

FIRST, SECOND = (
    {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True} for prompt in ("The king", "A wolf")
)


def request(**body: Any) -> bytes:
    data = json.dumps(body).encode()
    return head_of("/v1/completions", len(data)) + data


def connect(server, data: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), SECONDS)
    client.sendall(data)
    return client


def next_reply(came: BinaryIO) -> Reply:
    status, headers, body = int(came.readline().split()[1]), {}, b""
    while (line := came.readline()) != b"\r\n":
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    if "content-length" in headers:
        return Reply(status, headers, came.read(int(headers["content-length"])))
    while size := int(came.readline(), 16):
        body += came.read(size)
        assert came.readline() == b"\r\n"
    assert came.readline() == b"\r\n"
    return Reply(status, headers, body)


def text_of(reply: Reply, is_streamed: bool) -> str:
    assert reply.status == 200
    return "".join(part["choices"][0]["text"] for part in (reply.events if is_streamed else [reply.json]))


@pytest.mark.parametrize("second", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("first", [False, True], ids=["whole", "streamed"])
def test_two_requests_at_once_are_answered_in_their_order(server, first, second):
    data = request(**FIRST, stream=first) + request(**SECOND, stream=second)
    with connect(server, data) as client, client.makefile("rb") as came:
        texts = [text_of(next_reply(came), is_streamed) for is_streamed in (first, second)]
    assert texts == [text_of(server.complete(**asked), False) for asked in (FIRST, SECOND)]


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_who_leaves_amid_the_first_frees_its_row_and_the_second_never_begins(server, llm, is_streamed, is_late):
    first, second = (request(**asked, stream=is_streamed) for asked in (FIRST, SECOND))
    server.forget()
    with llm.engine.wrapped(Gate) as gate:
        client = connect(server, first if is_late else first + second)
        gate.wait_until_asked(1)
        if is_late:
            client.sendall(second)
        gate.allow(2)
        gate.wait_until_asked(3)
        client.close()
        ended = server.ended()
        assert (ended["status"], ended["finish"]) == (499, "abort")
        gate.allow(1)
        until(lambda: not llm.engine.scheduler.running)
        until(lambda: not server.num_connections)
        assert (gate.num_taken, len(llm.engine.scheduler.waiting)) == (3, 0)
