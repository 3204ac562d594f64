"""Connection: uvicorn's, which gives up a client that neither asks nor reads, and writes streams without detours."""

import time
from collections.abc import Callable
from typing import Any
from weakref import proxy

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from tinygpt.server.transport.gathering import GatheringTransport
from tinygpt.server.transport.own import CONNECTION

PATIENCE = 30.0  # seconds
MAX_AHEAD = 2**16  # bytes of further requests that are read before there is a reply to the first


class Connection(H11Protocol):
    """A client may take PATIENCE for the head of a request, and as long without reading any more of a reply.

    uvicorn itself waits for both for ever. A connection that is given up counts as one that its client has closed.
    """

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None):
        # A proxy, because the connection has the scope.
        super().__init__(config, server_state, {**app_state, CONNECTION: proxy(self)}, _loop)

    def write(self, part: bytes) -> None:
        """Write a part of the body that has been begun by `send`, and is ended by it. `part` is not empty.

        `send` is a coroutine within others, one for each layer of the app, and has h11 keep its books: all of that
        takes longer than to write a token's event. What the client has no room for stays in memory. What was kept back
        goes with it.
        """
        if not self.cycle.disconnected:
            is_chunked = self.scope["http_version"] >= "1.1"  # else the body ends with the connection
            part = b"%x\r\n%b\r\n" % (len(part), part) if is_chunked else part
            self._num_written += len(part)
            self.transport.write(part)
            self.transport.flush()

    def keep(self) -> None:
        """Keep back what is written until `flush`, so that it goes as one: to hand the system a part takes 12 µs."""
        self.transport.keep()

    def flush(self) -> None:
        self.transport.flush()

    @property
    def has_body(self) -> bool:
        """Whether the request's body is here as a whole, so that nobody waits for any of it."""
        return not self.cycle.more_body

    @property
    def is_gone(self) -> bool:
        """Whether the client has left before its reply was complete."""
        return self.cycle.disconnected

    def when_gone(self, call: Callable[[], Any] | None) -> None:
        """Have `call` called when the client leaves, or at once if it has left. None: have nothing called."""
        self.flow.resume_reading()  # paused behind a long body, it would not see that the client leaves
        self._when_gone = call
        self._num_ahead = 0
        if call is not None and self.is_gone:
            call()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(GatheringTransport(transport))
        self._when_gone: Callable[[], Any] | None = None
        self._last_cycle: Any = self  # none that there is
        self._full_since: float | None = None
        self._num_written = self._num_taken = 0  # bytes by `write`; of them, less what waited at the last look
        self._watch = self.loop.call_later(PATIENCE, self._look)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._when_gone is not None:  # uvicorn has paused reading, and would not see that the client leaves
            self._num_ahead += len(data)
            if self._num_ahead <= MAX_AHEAD:
                self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)
        if self._when_gone is not None and self.is_gone:
            self._when_gone()

    def pause_writing(self) -> None:
        self._full_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._full_since = None
        super().resume_writing()

    def _should_upgrade(self) -> bool:
        """No: uvicorn would advise in the log to install a library for WebSockets. The request is answered as it is."""
        return False

    def _look(self) -> None:
        if self._is_stuck():
            self.transport.abort()
            return
        self._watch = self.loop.call_later(PATIENCE, self._look)

    def _is_stuck(self) -> bool:
        before, self._num_taken = self._num_taken, self._num_written - self.transport.get_write_buffer_size()
        if self._full_since is not None:
            return self._num_taken == before and time.monotonic() - self._full_since >= PATIENCE
        is_idle = self.cycle is None or self.cycle.response_complete
        is_same, self._last_cycle = self.cycle is self._last_cycle, self.cycle
        return is_idle and is_same
