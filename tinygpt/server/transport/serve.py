"""Serving an app from this process: uvicorn, until a signal ends it, and what is running has ended."""

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from tinygpt.server.refusals.errors import ApiError
from tinygpt.server.state import ServerState
from tinygpt.server.transport.connection import Connection

log = logging.getLogger("tinygpt.server")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
KEEP_ALIVE_SECONDS = 30
FLUSH_SECONDS = 2.0  # that clients have to read why their streams have ended


def serve(app: Starlette, listener: socket.socket, drain_seconds: float, on_start: Callable[[], None]) -> None:
    """Answer until SIGTERM or Ctrl-C, then refuse new work, and return when what runs has ended.

    drain_seconds: after which it is ended, each stream with an event that says so. A second signal ends the process at
    once. on_start: called when the first request can come.
    """
    server_of(app, drain_seconds, on_start).run(sockets=[listener])
    log.info("the server has ended")


def server_of(app: Starlette, drain_seconds: float, on_start: Callable[[], None]) -> "Server":
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    return Server(config, app.state.server, drain_seconds, on_start)


class Server(uvicorn.Server):
    """uvicorn's, which would cut streams off without a word, and end by the signal that it got."""

    def __init__(self, config: uvicorn.Config, state: ServerState, drain_seconds: float, on_start: Callable[[], None]):
        super().__init__(config)
        self._state, self._drain_seconds, self._on_start = state, drain_seconds, on_start
        self._loop: asyncio.AbstractEventLoop | None = None  # while it runs

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        _wait_for_cores()
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._on_start()
        self._building = asyncio.ensure_future(self._build_models())

    async def _build_models(self) -> None:
        """Before the first request, if it is not among the first: between others' turns."""
        for _ in self._state.unbuilt_models:
            await asyncio.sleep(0)

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop listening: once it is told to end, and all that ran has ended.

        Who connects until then, such as a load balancer, is told that the server is about to end.
        """
        is_told = await super().on_tick(counter)
        return is_told and (self.force_exit or not self._state.num_open)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        is_main = threading.current_thread() is threading.main_thread()  # no other may have handlers
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS if is_main}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._state.drain()
        if running := self._state.num_open:
            log.info(
                "shutting down: what runs may finish, and a second signal ends it at once",
                extra={"fields": {"running": running, "drain_seconds": self._drain_seconds}},
            )
        self._loop.call_later(self._drain_seconds, self._state.stop_all, _shutting_down())
        self._loop.call_later(self._drain_seconds + FLUSH_SECONDS, partial(setattr, self, "force_exit", True))


def _wait_for_cores() -> None:
    """Have this thread wait until another one lets it run, or has had its turn, rather than take a core away.

    Most of what it would take a core from is a thread amid a kernel's item, for which all others would wait. Threads
    that it starts are like it: the engine's, which leads the steps, takes no core away either.
    """
    with suppress(AttributeError, OSError):  # other systems have no such thing, and a sandbox may not allow it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _shutting_down() -> ApiError:
    return ApiError(503, "the server was shut down before this was finished: ask again.", code="shutting_down")
