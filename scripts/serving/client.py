"""Streamed completions: when each of their tokens came.

While it runs, bytes are kept with the time of their arrival, and nothing else is done: client and server share a CPU.
What the bytes mean is read by h11 when all that is measured has ended: to read one takes as long as some steps.
"""

import asyncio
import json
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult

import h11

END = b"\r\n0\r\n\r\n"  # of a body in chunks
SIZE = 2**16  # bytes that are read at once
REST = 0.001  # seconds


@dataclass
class Exchange:
    """A request and its reply. Times are of time.perf_counter()."""

    sent: float
    status: int = 0
    token_times: list[float] = field(default_factory=list)  # of each event with a text
    num_tokens: int = 0  # as the server counts them: some have no text of their own, and no event
    text: str = ""
    has_reached_limit: bool = False  # of tokens
    body: bytes = b""  # of a reply that is no stream
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.status == 200 and self.error is None and bool(self.token_times)

    @property
    def time_to_first_token(self) -> float:
        return self.token_times[0] - self.sent

    @property
    def time_per_output_token(self) -> float | None:
        seconds = self.token_times[-1] - self.token_times[0]
        return seconds / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def inter_token_latencies(self) -> list[float]:
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass(frozen=True)
class Recording:
    """What was sent and what came, not read yet."""

    sent: float
    pieces: list[tuple[float, bytes]]  # when each came
    error: str | None
    max_tokens: int

    def read(self) -> Exchange:
        result = Exchange(self.sent, error=self.error)
        try:
            _read([*self.pieces, (self.sent, b"")], result)  # nothing more has come, whoever ended it
        except h11.RemoteProtocolError as error:
            result.error = result.error or f"the reply was broken, or cut off: {error}"
        if not result.num_tokens:  # some servers tell no usage
            result.num_tokens = self.max_tokens if result.has_reached_limit else len(result.token_times)
        return result


class Sockets:
    """What has come for all clients of a loop is read together.

    To be woken for each piece takes longer than to read it, and a core from the server. Where there are several
    clients, more will come behind the first piece: it rests before it reads, and their times are late by that at most.
    `with` ends it.
    """

    def __init__(self) -> None:
        self._loop, self._selector = asyncio.get_running_loop(), selectors.DefaultSelector()

    def __enter__(self) -> "Sockets":
        self._wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.remove_reader(self._selector.fileno())
        self._selector.close()

    def add(self, connection: socket.socket, read: Callable[[], None]) -> None:
        """Have `read` called whenever something has come."""
        self._selector.register(connection, selectors.EVENT_READ, read)

    def remove(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)

    def _wait(self) -> None:
        self._loop.add_reader(self._selector.fileno(), self._rest)

    def _rest(self) -> None:
        if len(self._selector.get_map()) == 1:
            self._read()
            return
        self._loop.remove_reader(self._selector.fileno())
        self._loop.call_later(REST, self._read_and_wait)

    def _read_and_wait(self) -> None:
        if self._selector.get_map() is not None:  # it has not ended meanwhile
            self._read()
            self._wait()

    def _read(self) -> None:
        for key, _ in self._selector.select(0):
            key.data()


class Client:
    """Asks a server one thing after another, over one connection for as long as the server keeps it."""

    def __init__(self, url: SplitResult, sockets: Sockets):
        self._url, self._sockets = url, sockets
        self._connection: _Connection | None = None

    async def record(self, path: str, body: dict[str, Any], leave_after: float | None = None) -> Recording:
        """leave_after: seconds after which the client closes the connection.

        A server may close a connection that nobody uses, at the very moment that it is used again. So where nothing
        comes by one that was kept, the request is sent once more, by a new one.
        """
        data = json.dumps(body).encode()
        lines = [f"POST {self._url.path}{path} HTTP/1.1", f"host: {self._url.netloc}", "content-type: application/json"]
        request = "\r\n".join([*lines, f"content-length: {len(data)}", "", ""]).encode() + data
        sent, pieces, error = time.perf_counter(), [], None
        if self._connection is not None:
            with suppress(ConnectionError):
                pieces, error = await self._ask(self._connection, request, leave_after)
        if not pieces and error is None:
            self._connection = await _Connection.made(self._url, self._sockets)
            pieces, error = await self._ask(self._connection, request, leave_after)
        return Recording(sent, pieces, error, body.get("max_tokens", 0))

    async def _ask(
        self, connection: "_Connection", request: bytes, leave_after: float | None
    ) -> tuple[list[tuple[float, bytes]], str | None]:
        """What came, and an error if the client left before all of it had."""
        try:
            await connection.ask(request)
            done, _ = await asyncio.wait({connection.ended}, timeout=leave_after)
        finally:
            if not connection.is_kept:
                self.close()
        return connection.pieces, None if done else "left"

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


async def exchange(url: SplitResult, path: str, body: dict[str, Any], leave_after: float | None = None) -> Exchange:
    """As `record`, and read at once."""
    return (await record(url, path, body, leave_after)).read()


async def record(url: SplitResult, path: str, body: dict[str, Any], leave_after: float | None = None) -> Recording:
    """What a client with this one request gets."""
    with Sockets() as sockets:
        client = Client(url, sockets)
        try:
            return await client.record(path, body, leave_after)
        finally:
            client.close()


class _Connection:
    """Keeps what comes for one request after another, until each has its reply.

    is_kept: the reply is whole, and there may be another behind it.
    """

    def __init__(self, connection: socket.socket, sockets: Sockets):
        self._socket, self._sockets = connection, sockets

    @classmethod
    async def made(cls, url: SplitResult, sockets: Sockets) -> "_Connection":
        made = socket.socket()
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().sock_connect(made, (url.hostname, url.port))
        except BaseException:
            made.close()
            raise
        return cls(made, sockets)

    async def ask(self, request: bytes) -> None:
        self.pieces: list[tuple[float, bytes]] = []
        self.is_kept = self._is_chunked = False
        loop = asyncio.get_running_loop()
        self.ended = loop.create_future()
        self._sockets.add(self._socket, self._read)
        await loop.sock_sendall(self._socket, request)

    def close(self) -> None:
        if not self.ended.done():
            self._sockets.remove(self._socket)
        self._socket.close()

    def _read(self) -> None:
        try:
            data = self._socket.recv(SIZE)
        except ConnectionError:
            data = b""
        if data:
            self.pieces.append((time.perf_counter(), data))
            if len(self.pieces) == 1:
                self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in data.lower()
            if not self._is_whole(data):
                return
            self.is_kept = b"\r\nconnection: close\r\n" not in self.pieces[0][1].lower()
        self._sockets.remove(self._socket)
        self.ended.set_result(None)

    def _is_whole(self, last: bytes) -> bool:
        """Streams come in chunks, whose end is seen without a look at what they hold. Of all else there is little."""
        if not self._is_chunked:
            return _read(self.pieces, Exchange(0.0))
        if not last.endswith(b"\n"):
            return False
        return (last if len(last) >= len(END) else b"".join(piece for _, piece in self.pieces)).endswith(END)


def _read(pieces: list[tuple[float, bytes]], result: Exchange) -> bool:
    """Put into the result what came. Returns whether the reply is whole, by what it says itself."""
    connection, waiting, is_whole = h11.Connection(h11.CLIENT), b"", False
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
    connection.send(h11.EndOfMessage())
    is_stream = False
    for arrived, piece in pieces:
        connection.receive_data(piece)
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Response):
                result.status = event.status_code
                is_stream = dict(event.headers).get(b"content-type", b"").startswith(b"text/event-stream")
            elif isinstance(event, h11.Data) and is_stream:
                waiting = _read_events(waiting + bytes(event.data), arrived, result)
            elif isinstance(event, h11.Data):
                result.body += bytes(event.data)
            elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                is_whole = True
                break
    if result.status != 200 and result.error is None:
        result.error = result.body.decode(errors="replace")[:200]
    return is_whole


def _read_events(data: bytes, arrived: float, result: Exchange) -> bytes:
    """Note whole events; the beginning of the next one is returned."""
    *events, rest = data.replace(b"\r\n", b"\n").split(b"\n\n")
    for event in events:
        if not event.startswith(b"data: {"):
            continue
        value = json.loads(event[6:])
        if "error" in value:
            result.error = str(value["error"])[:200]
        result.num_tokens = (value.get("usage") or {}).get("completion_tokens") or result.num_tokens
        for choice in value.get("choices", ()):
            result.has_reached_limit |= choice.get("finish_reason") == "length"
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if text or choice.get("token_ids"):
                result.token_times.append(arrived)
                result.text += text or ""
    return rest
