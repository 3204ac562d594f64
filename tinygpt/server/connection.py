"""Connection: HTTP/1.1 of uvicorn and httptools, with a bound on each thing that a client makes it keep."""

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .refusals import ApiError, respond

HEAD_BYTES = 2**16  # of a request's path, headers and trailers
NUM_HEADERS = 100  # trailers included
HEAD_SECONDS = 30.0
NUM_PIPELINED = 16  # requests that wait for the reply to another
NUM_PIECES = 10_000  # of a body, unless they have PIECE_BYTES on average: each takes 2 us of the event loop
PIECE_BYTES = 16
LARGE_HEAD = f"path and headers have at most {HEAD_BYTES} bytes, and there are at most {NUM_HEADERS} headers."


class Connection(HttpToolsProtocol):
    """A connection that ends if its client sends more than a bound; httptools has none."""

    def __init__(self, *given: Any, **options: Any):
        super().__init__(*given, **options)
        self._refusal = ApiError(400, "this is not HTTP/1.1.")
        self._begin_head()
        self._head_timer = self._timer()

    def _begin_head(self) -> None:
        self._num_unfinished = 0  # bytes since a call of the parser: it keeps an unfinished header
        self._is_in_head = True  # not in a body or its trailers
        self._num_head_bytes = 0
        self._num_headers = 0
        self._num_pieces = 0
        self._num_body_bytes = 0

    def _timer(self) -> asyncio.TimerHandle:
        return self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        self._unset_keepalive_if_required()  # uvicorn forgets it after a reset
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_unfinished += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        if self._num_unfinished > HEAD_BYTES and not self.transport.is_closing():
            self._refusal = ApiError(431, LARGE_HEAD)
            self.send_400_response("")

    def _parse(self, data: bytes) -> None:
        """Parse data. A head that offers an upgrade, after which httptools sees no body, comes again without it."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as ended:
            first = b"%s %s HTTP/%s" % (
                self.parser.get_method(),
                self.url,
                self.parser.get_http_version().encode(),
            )
            lines = [b"%s: %s" % each for each in self.headers if each[0] != b"upgrade"]
            self._parse(b"\r\n".join([first, *lines, b"\r\n"]) + data[ended.args[0] :])

    def send_400_response(self, msg: str) -> None:
        """Send the refusal, unless a reply is under way, and end the connection."""
        if self.cycle is None or self.cycle.response_complete:
            reply = respond(self._refusal)
            headers = [*reply.raw_headers, (b"connection", b"close")]
            lines = [name + b": " + value + b"\r\n" for name, value in headers]
            self.transport.write(b"".join([STATUS_LINE[reply.status_code], *lines, b"\r\n", reply.body]))
        self.pipeline.clear()
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count_head(len(name) + len(value))
        if self._is_in_head:
            super().on_header(name, value)

    def _count_head(self, num_bytes: int) -> None:
        self._num_unfinished = 0
        self._num_head_bytes += num_bytes
        self._refuse_if(self._num_head_bytes > HEAD_BYTES or self._num_headers > NUM_HEADERS, 431, LARGE_HEAD)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self._refuse_if(self.parser.get_method() == b"CONNECT", 400, "this is no proxy.")
            return
        self._head_timer.cancel()
        self._is_in_head = False
        super().on_headers_complete()
        too_many = len(self.pipeline) > NUM_PIPELINED
        self._refuse_if(too_many, 400, f"at most {NUM_PIPELINED} requests may wait for a reply.")

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unfinished = 0
        self._num_pieces += 1
        self._num_body_bytes += len(body)
        too_many = self._num_pieces > max(NUM_PIECES, self._num_body_bytes // PIECE_BYTES)
        self._refuse_if(
            too_many, 400, f"a body has at most {NUM_PIECES} chunks of less than {PIECE_BYTES} bytes."
        )
        super().on_body(body)

    def _refuse_if(self, is_true: bool, status: int, message: str) -> None:
        """Raise if a bound is passed: the parser ends, and data_received sends the refusal."""
        if is_true:
            self._refusal = ApiError(status, message)
            raise httptools.HttpParserError

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last and not self.transport.is_closing():
            self._head_timer.cancel()
            self._head_timer = self._timer()
