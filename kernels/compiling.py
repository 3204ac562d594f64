"""Compiling kernels takes seconds: it is announced where it happens, and no time that is reported contains it.

Each backend says here when a kernel begins and ends to compile, and when a thread waits for one. Nothing here knows a
compiler.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

ANNOUNCEMENT = (
    "compiling kernels for this machine: it takes seconds, once for each dtype and kind of request. "
    "tinygpt.warmup() compiles them ahead of time."
)

logger = logging.getLogger(__name__)


class Listener(Protocol):
    """Who is told of each kernel that compiles, by the thread that compiles it."""

    def begin(self, name: str) -> None: ...

    def end(self) -> None: ...


class _Open(threading.local):
    """The kernels that a thread compiles, each for the one before: who was told of their beginning."""

    def __init__(self):
        self.kernels: list[tuple[Listener, ...]] = []


class Announcer:
    """Tells the listeners of this process. Where nobody listens, the log says once what is going on.

    Of a kernel's end they hear who heard its beginning.
    """

    def __init__(self):
        self._listeners: list[Listener] = []
        self._is_said = False
        self.num_begun = 0  # kernels that were compiled, or that are
        self.num_kept = 0  # kernels that the next process will find
        self._open = _Open()

    @contextmanager
    def told(self, listener: Listener) -> Iterator[None]:
        """In the block, tell `listener` instead of the log."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def begin(self, name: str) -> None:
        if not self._listeners and not self._is_said:
            self._is_said = True
            logger.warning(ANNOUNCEMENT)
        logger.debug("%s is compiled", name)
        self.num_begun += 1
        self._open.kernels.append(told := tuple(self._listeners))
        for listener in told:
            listener.begin(name)

    def end(self) -> None:
        """Of the kernel that this thread began last; nothing where none is under way."""
        if self._open.kernels:
            for listener in self._open.kernels.pop():
                if listener in self._listeners:
                    listener.end()

    def keep(self) -> None:
        """A kernel has come to the disk."""
        self.num_kept += 1

    @contextmanager
    def ended(self) -> Iterator[None]:
        """What begins in the block, and is broken off, ends with it."""
        before = len(self._open.kernels)
        try:
            yield
        finally:
            while len(self._open.kernels) > before:
                self.end()


class CompileClock:
    """When the threads that it watches waited for kernels: to be compiled, by them or others, or read from the disk."""

    def __init__(self):
        self._spans: list[tuple[float, float]] = []  # by time.perf_counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what this thread waits for in the block."""
        _thread.clocks.append(self)
        try:
            yield
        finally:
            if len(_thread.clocks) == 1 and _thread.depth:  # a wait that was broken off never ends
                _thread.depth = 1
                end_wait()
            _thread.clocks.remove(self)

    def seconds(self, start: float | None, stop: float | None) -> float:
        """How much of the time between two moments was waited; 0 if one of them never came."""
        if start is None or stop is None:
            return 0.0
        waited = 0.0
        for begin, end in reversed(self._spans):  # in the order of their ends: a warm step looks at one
            if end <= start:
                break
            waited += max(min(stop, end) - max(start, begin), 0.0)
        return waited

    def since(self, start: float) -> float:
        """Seconds from a moment until now, without those that were waited."""
        now = time.perf_counter()
        return now - start - self.seconds(start, now)

    def note(self, begin: float, end: float) -> None:
        self._spans.append((begin, end))


class _Thread(threading.local):
    """What watches this thread, and how many waits it is in, each within the one before."""

    def __init__(self):
        self.clocks: list[CompileClock] = []
        self.depth = 0
        self.began = 0.0


ANNOUNCER = Announcer()
_thread = _Thread()


@contextmanager
def waited_for(name: str) -> Iterator[None]:
    """In the block, this thread waits for a kernel that another process compiles, and keeps."""
    ANNOUNCER.begin(name)
    begin_wait()
    try:
        yield
        ANNOUNCER.keep()
    finally:
        end_wait()
        ANNOUNCER.end()


@contextmanager
def looked_for() -> Iterator[None]:
    """In the block, this thread reads a kernel from the disk, or compiles it and says when it begins."""
    begin_wait()
    try:
        with ANNOUNCER.ended():
            yield
    finally:
        end_wait()


def begin_wait() -> None:
    """This thread waits for a kernel, or for the compiler, until `end_wait`."""
    if _thread.clocks:
        if not _thread.depth:
            _thread.began = time.perf_counter()
        _thread.depth += 1


def end_wait() -> None:
    if _thread.depth:
        _thread.depth -= 1
        if not _thread.depth:
            now = time.perf_counter()
            for clock in _thread.clocks:
                clock.note(_thread.began, now)
