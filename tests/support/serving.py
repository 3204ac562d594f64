"""The server on a loopback port in a thread of this process, and a client that may leave, stall or send nonsense."""

import asyncio
import http.client
import json
import logging
import queue
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from support.processes import until
from tinygpt import LLM
from tinygpt.server.app import LOOPBACK, Server, create_app, listen
from tinygpt.server.config import ServerConfig

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
    def choices(self) -> list[dict[str, Any]]:
        return self.json["choices"]

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The choices of a stream's events."""
        return [choice for event in self.events for choice in event["choices"]]

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


class RawRequest:
    """A request on a socket of its own, which is left when the test says so."""

    def __init__(self, port: int, path: str, body: Any):
        data = json.dumps(body).encode()
        fields = f"host: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        self.socket = socket.create_connection(("127.0.0.1", port), SECONDS)
        self.socket.sendall(f"POST {path} HTTP/1.1\r\n{fields}".encode() + data)
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


class Served(logging.Handler):
    """A running server. `ended` gives what is logged of each request when all of it is over."""

    def __init__(self, llm: LLM, drain_seconds: float, config: ServerConfig):
        super().__init__()
        self.app = create_app(llm, config)
        self.api = self.app.state.api
        self._log: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._started = threading.Event()
        self._listener = listen("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self._server = Server(self.app, drain_seconds, self._started.set)
        self.thread = threading.Thread(target=self._run)
        self.clients: list[RawRequest] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def ask(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> Reply:
        return ask(self.port, path, body, method, **headers)

    def complete(self, **body: Any) -> Reply:
        return self.ask("/v1/completions", body)

    def begin(self, path: str = "/v1/completions", /, **body: Any) -> RawRequest:
        """A request whose client is the test's to lead. It is closed with the server, if not before."""
        self.clients.append(RawRequest(self.port, path, body))
        return self.clients[-1]

    def ended(self) -> dict[str, Any]:
        """What is logged next. Servers of one process share a log."""
        return self._log.get(timeout=SECONDS)

    def forget(self) -> None:
        """What was logged so far, or is about to be: a client may have its reply before there is a line of it."""
        until(lambda: not self._server.server_state.tasks)
        while not self._log.empty():
            self._log.get()

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "fields"):
            self._log.put(record.fields)

    def terminate(self) -> None:
        self._server.handle_exit(signal.SIGTERM, None)

    def start(self) -> None:
        self.thread.start()
        assert self._started.wait(SECONDS)

    def _run(self) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            await self._server.serve([self._listener])

        asyncio.run(serve())


@contextmanager
def served(llm: LLM, drain_seconds: float = 60.0, **config: Any) -> Iterator[Served]:
    """A server of the LLM, which is left open. config: fields of ServerConfig."""
    defaults = {"served_model_names": ("demo", "other/name"), "allowed_hosts": LOOPBACK}
    server = Served(llm, drain_seconds, ServerConfig(**{**defaults, **config}))
    log = logging.getLogger("tinygpt.server.access")
    level = log.level
    log.addHandler(server)
    log.setLevel(logging.INFO)
    server.start()
    try:
        yield server
    finally:
        if not server._server.should_exit:
            server.terminate()
        server.thread.join(SECONDS)
        for client in server.clients:
            client.close()
        log.removeHandler(server)
        log.setLevel(level)
        assert not server.thread.is_alive()
