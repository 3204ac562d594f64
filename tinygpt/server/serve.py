"""Serving an app from this process: the socket, the log, and uvicorn until a signal ends it."""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from tinygpt.errors import RequestError

log = logging.getLogger("tinygpt.server")
KEEP_ALIVE_SECONDS = 30
FLUSH_SECONDS = 2.0  # for clients to read why their streams have ended


class Server(uvicorn.Server):
    """uvicorn's server, which drains after a signal and then ends with status 0.

    It listens while it drains, so that load balancers read status 503 from /health. A second signal ends it at once.
    """

    def __init__(self, app: FastAPI, drain_seconds: float, on_start: Callable[[], None]):
        """drain_seconds: until running requests end with an error. on_start: called when requests can come."""
        off = {"ws": "none", "lifespan": "off", "log_config": None}
        off |= {"access_log": False, "server_header": False, "proxy_headers": False}
        seconds = {"timeout_keep_alive": KEEP_ALIVE_SECONDS, "timeout_graceful_shutdown": int(FLUSH_SECONDS)}
        super().__init__(uvicorn.Config(app, **off, **seconds))
        self._api, self._drain_seconds, self._on_start = app.state.api, drain_seconds, on_start
        self._deadline: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def on_tick(self, counter: int) -> bool:
        is_told, running = await super().on_tick(counter), len(self.server_state.tasks)
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
        self.should_exit = self._api.is_draining = True


def serve(app: FastAPI, listener: socket.socket, drain_seconds: float, on_start: Callable[[], None]) -> None:
    """Serve until SIGTERM or Ctrl-C, and until all that ran then has ended."""
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises it again at its end: status 0
        signal.signal(number, lambda *_: None)
    Server(app, drain_seconds, on_start).run(sockets=[listener])
    log.info("the server has ended")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket: clients that connect before the model is loaded wait. RequestError if it is taken."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        message = f"{host}:{port} cannot be listened on ({why}): give another --port, or a --host of this machine."
        raise RequestError(message) from None


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def configure_logging(form: str) -> None:
    """Write the logs of the server, uvicorn and asyncio to stderr, as "text" or as "json" lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    for name, level in (("tinygpt.server", logging.INFO), ("uvicorn", logging.WARNING), ("asyncio", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.level, logger.propagate = [handler], level, False


class TextLines(logging.Formatter):
    """2026-01-31T12:00:00Z INFO request id=... status=200"""

    converter = time.gmtime

    def __init__(self):
        super().__init__("{asctime} {levelname} {message}", "%Y-%m-%dT%H:%M:%SZ", style="{")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {}).items()
        return " ".join([super().formatMessage(record), *(f"{n}={_unbroken(v)}" for n, v in fields if v is not None)])


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
