"""Serving an app from this process: the socket, the log, and uvicorn until a signal ends it."""

import asyncio
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from ..errors import RequestError

Call = Callable[[], None]
log = logging.getLogger("tinygpt.server")
KEEP_ALIVE_SECONDS = 30
UNREAD_SECONDS = 60.0  # until the connection of a client ends that reads nothing
FLUSH_SECONDS = 2.0  # for clients to read why their streams have ended
END_SECONDS = 5.0  # after that, for threads to end
# After a kernel the engine waits so long for the GIL while the loop writes; Python's default is 0.005.
SWITCH_SECONDS = 0.001
BACKLOG = 128  # connections that wait to be accepted; asyncio tries as many at once
OUT_OF_DESCRIPTORS = "socket.accept() out of system resource"
LOG_SECONDS = 60.0  # asyncio's, and how often it is told


class Server(uvicorn.Server):
    """uvicorn's server, which drains after a signal and then ends with status 0.

    It listens while it drains, so that load balancers read status 503 from /health. A second signal ends it at once.
    """

    def __init__(self, app: FastAPI, drain_seconds: float, on_start: Call, on_signal: Call = lambda: None):
        """drain_seconds: until running requests end with an error.

        on_start, on_signal: called when requests can come, and at the first signal.
        """
        off = {"ws": "none", "lifespan": "off", "log_config": None}
        off |= {"access_log": False, "server_header": False, "proxy_headers": False, "backlog": BACKLOG}
        seconds = {"timeout_keep_alive": KEEP_ALIVE_SECONDS, "timeout_graceful_shutdown": int(FLUSH_SECONDS)}
        super().__init__(uvicorn.Config(app, **off, **seconds))
        self._api = app.state.api
        self._drain_seconds = drain_seconds
        self._on_start = on_start
        self._on_signal = on_signal
        self._deadline: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def on_tick(self, counter: int) -> bool:
        is_told = await super().on_tick(counter)
        running = len(self.server_state.tasks)
        if is_told and self._deadline is None:
            self._deadline = time.monotonic() + self._drain_seconds + FLUSH_SECONDS
            asyncio.get_running_loop().call_later(self._drain_seconds, self._api.stop_all)
            if running:
                fields = {"running": running, "drain_seconds": self._drain_seconds}
                log.info("shutting down: a second signal ends it at once", extra={"fields": fields})
        return is_told and (not running or time.monotonic() > self._deadline)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self._on_signal()
        self.should_exit = self._api.is_draining = True


def serve(app: FastAPI, listener: socket.socket, drain_seconds: float, on_start: Call) -> None:
    """Serve until SIGTERM or Ctrl-C, and until all that ran then has ended; END_SECONDS too late with status 1."""
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises it again at its end: status 0
        signal.signal(number, lambda *_: None)
    allow_all_descriptors()
    sys.setswitchinterval(SWITCH_SECONDS)
    # Python waits for its threads; faulthandler's needs no GIL, and a full stderr cannot block it.
    seconds = min(drain_seconds + FLUSH_SECONDS + END_SECONDS, threading.TIMEOUT_MAX / 2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    end_in_any_case = partial(faulthandler.dump_traceback_later, seconds, exit=True, file=nowhere)
    Server(app, drain_seconds, on_start, end_in_any_case).run(sockets=[listener])
    log.info("the server has ended")


def allow_all_descriptors() -> None:
    """Raise the soft limit of open files, often 1024, to the hard limit: each connection takes a descriptor."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limit; macOS refuses some values
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket: clients that connect before the model is loaded wait. RequestError if it is taken."""
    try:
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except (OSError, OverflowError) as error:
        why = str(getattr(error, "strerror", None) or error).partition(" (while ")[0]
        message = (
            f"{host}:{port} cannot be listened on ({why}): give another --port, or a --host of this machine."
        )
        raise RequestError(message) from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux's; a reply of 70 MB would wait for ever
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_SECONDS))
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def configure_logging(form: str) -> None:
    """Write the logs of the server, uvicorn and asyncio to stderr, as "text" or as "json" lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Seldom())
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    for name, level in (
        ("tinygpt.server", logging.INFO),
        ("uvicorn", logging.WARNING),
        ("asyncio", logging.WARNING),
    ):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.level = level
        logger.propagate = False


class Seldom(logging.Filter):
    """asyncio logs used up descriptors, with a traceback, for each connection that waits, every second."""

    def __init__(self):
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.getMessage().startswith(OUT_OF_DESCRIPTORS):
            return True
        if is_due := record.created >= self._next:
            self._next = record.created + LOG_SECONDS
        return is_due


class TextLines(logging.Formatter):
    """2026-01-31T12:00:00Z INFO request id=... status=200"""

    converter = time.gmtime

    def __init__(self):
        super().__init__("{asctime} {levelname} {message}", "%Y-%m-%dT%H:%M:%SZ", style="{")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {}).items()
        return " ".join(
            [super().formatMessage(record), *(f"{n}={_unbroken(v)}" for n, v in fields if v is not None)]
        )


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {"time": record.created, "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields | getattr(record, "fields", {}))


def _unbroken(value: Any) -> str:
    """Return a value that cannot look like another field or line."""
    text = str(value)
    return text if text.isprintable() and " " not in text and '"' not in text else json.dumps(text)
