"""The server on a loopback port, in a thread of this process."""

import asyncio
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from support.http_client import SECONDS, RawRequest, Reply, ask
from tinygpt import LLM
from tinygpt.server.api import ServerConfig
from tinygpt.server.app import create_app
from tinygpt.server.security import LOOPBACK
from tinygpt.server.serve import Server, listen


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

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def ask(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> Reply:
        return ask(self.port, path, body, method, **headers)

    def complete(self, **body: Any) -> Reply:
        return self.ask("/v1/completions", body)

    def begin(self, **body: Any) -> RawRequest:
        """A completion whose client is the test's to lead."""
        return RawRequest(self.port, "/v1/completions", body)

    def ended(self, path: str | None = None) -> dict[str, Any]:
        """What is logged next, of a request to `path`. Servers of one process share a log."""
        while True:
            fields = self._log.get(timeout=SECONDS)
            if path in (None, fields["path"]):
                return fields

    def forget(self) -> None:
        """What was logged so far, or is about to be: a client may have its reply before there is a line of it."""
        until(lambda: not self._server.server_state.tasks)
        while not self._log.empty():
            self._log.get()

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "fields"):
            self._log.put(record.fields)

    def terminate(self) -> None:
        """As SIGTERM."""
        self._server.handle_exit(signal.SIGTERM, None)

    def start(self) -> None:
        self.thread.start()
        assert self._started.wait(SECONDS)

    def _run(self) -> None:
        asyncio.run(self._server.serve([self._listener]))


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
        log.removeHandler(server)
        log.setLevel(level)
        assert not server.thread.is_alive()


def until(condition: Callable[[], Any]) -> None:
    """Wait for what another thread is about to do."""
    for _ in range(SECONDS * 100):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")
