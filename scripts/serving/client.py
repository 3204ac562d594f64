"""One streamed completion over a connection of its own: when each of its tokens came.

While it runs, bytes are kept with the time of their arrival, and nothing else is done: client and server share a CPU.
What the bytes mean is read by h11 when all that is measured has ended: to read one takes as long as some steps.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult

import h11


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


class _Recorder(asyncio.Protocol):
    def __init__(self, request: bytes):
        self._request = request
        self.pieces: list[tuple[float, bytes]] = []
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


@dataclass(frozen=True)
class Recording:
    """What was sent and what came, not read yet."""

    sent: float
    pieces: list[tuple[float, bytes]]  # when each came
    error: str | None
    max_tokens: int

    def read(self) -> Exchange:
        result = Exchange(self.sent, error=self.error)
        _read(self.pieces, result)
        if not result.num_tokens:  # some servers tell no usage
            result.num_tokens = self.max_tokens if result.has_reached_limit else len(result.token_times)
        return result


async def exchange(url: SplitResult, path: str, body: dict[str, Any], leave_after: float | None = None) -> Exchange:
    """leave_after: seconds after which the client closes the connection."""
    return (await record(url, path, body, leave_after)).read()


async def record(url: SplitResult, path: str, body: dict[str, Any], leave_after: float | None = None) -> Recording:
    """As `exchange`, to be read later."""
    data = json.dumps(body).encode()
    lines = [f"POST {url.path}{path} HTTP/1.1", f"host: {url.netloc}", "content-type: application/json"]
    lines += [f"content-length: {len(data)}", "connection: close", "", ""]
    sent, error, loop = time.perf_counter(), None, asyncio.get_running_loop()
    request = "\r\n".join(lines).encode() + data
    transport, recorder = await loop.create_connection(lambda: _Recorder(request), url.hostname, url.port)
    try:
        await asyncio.wait_for(asyncio.shield(recorder.ended), leave_after)
    except (TimeoutError, asyncio.TimeoutError):
        error = "left"
    finally:
        transport.abort()
    return Recording(sent, recorder.pieces, error, body.get("max_tokens", 0))


def _read(pieces: list[tuple[float, bytes]], result: Exchange) -> None:
    connection, waiting = h11.Connection(h11.CLIENT), b""
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
                break
    if result.status != 200 and result.error is None:
        result.error = result.body.decode(errors="replace")[:200]


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
