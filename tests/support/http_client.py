"""A client of few words for tests of the server: one that may also leave, stall or say nonsense."""

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SECONDS = 60


def strict_json(text: str | bytes) -> Any:
    """A value as every parser of JSON reads it: NaN and Infinity are none."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return strict_json(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The values of a stream's events, which has to end with [DONE]."""
        *events, done, end = self.body.decode().split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        return [strict_json(event.removeprefix("data: ")) for event in events if not event.startswith(":")]


def ask(port: int, path: str, body: Any = None, method: str | None = None, **headers: str) -> Reply:
    """body: sent as JSON, or as it is if it is bytes. A header's underscores become hyphens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None:
        sent.setdefault("content-type", "application/json")
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, body, sent)
        reply = connection.getresponse()
        return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())
    finally:
        connection.close()


def head_of(path: str, length: int, *lines: str) -> bytes:
    """The head of a POST."""
    fields = ["host: 127.0.0.1", "content-type: application/json", f"content-length: {length}", *lines]
    return "\r\n".join([f"POST {path} HTTP/1.1", *fields, "", ""]).encode()


class RawRequest:
    """A request on a socket of its own, which is left when the test says so."""

    def __init__(self, port: int, path: str, body: Any):
        data = json.dumps(body).encode()
        self.socket = socket.create_connection(("127.0.0.1", port), SECONDS)
        self.socket.sendall(head_of(path, len(data)) + data)
        self._lines = self.socket.makefile("rb")

    def events(self) -> Iterator[dict[str, Any]]:
        """The events of a stream, as they come, to its end."""
        for line in self._lines:
            if line == b"data: [DONE]\n":
                return
            if line.startswith(b"data: {"):
                yield strict_json(line[6:])

    def close(self) -> None:
        self._lines.close()
        self.socket.close()

    def reset(self) -> None:
        """Close with an RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.close()

    def half_close(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)
