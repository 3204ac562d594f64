"""Connection: uvicorn's, which gives up a client that neither asks nor reads."""

import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE = 30.0  # seconds


class Connection(H11Protocol):
    """A client may take PATIENCE for the head of a request, and as long to make room for more of a reply.

    uvicorn itself waits for both for ever. A connection that is given up counts as one that its client has closed.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._last_cycle: Any = self  # none that there is
        self._full_since: float | None = None
        self._watch = self.loop.call_later(PATIENCE, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._full_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._full_since = None
        super().resume_writing()

    def _look(self) -> None:
        if self._is_stuck():
            self.transport.abort()
            return
        self._watch = self.loop.call_later(PATIENCE, self._look)

    def _is_stuck(self) -> bool:
        if self._full_since is not None:
            return time.monotonic() - self._full_since >= PATIENCE
        is_idle = self.cycle is None or self.cycle.response_complete
        is_same, self._last_cycle = self.cycle is self._last_cycle, self.cycle
        return is_idle and is_same
