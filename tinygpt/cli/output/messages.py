"""What a command says on stderr, beside its text on stdout."""

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from tinygpt.errors import TinyGPTError

INTERVAL = 20.0  # seconds between lines that say how far something has come, where no terminal shows it


class Pace:
    """When it is time for such a line."""

    def __init__(self):
        self._last = time.perf_counter()

    def is_due(self) -> bool:
        """Whether the last one was a while ago, or the beginning; where it was, a line is written now."""
        now = time.perf_counter()
        if sys.stderr.isatty() or now - self._last < INTERVAL:
            return False
        self._last = now
        return True


def progress(noun: str) -> Callable[..., Iterator[Any]]:
    """What stands in for tqdm: its bar on a terminal, and elsewhere a line now and then. `noun`: what is counted."""

    def shown(items: Iterable[Any], total: int, **_: Any) -> Iterator[Any]:
        from tqdm import tqdm

        pace = Pace()
        # disable=None: no bar where stderr is no terminal.
        for number, item in enumerate(tqdm(items, total=total, unit=noun, disable=None), 1):
            if pace.is_due() and number < total:
                say(f"{number} of {counted(total, noun)} done")
            yield item

    return shown


class Screen:
    """The last line of the terminal: a status may stand there, and whatever is written next takes its place."""

    def __init__(self):
        self._lock = threading.RLock()
        self._width = 0  # of the status that is there
        self._is_kept = False  # for one that comes before others
        self._is_mid_line = False  # there is a text that has not come to the end of its line
        self.log_format = "text"  # of messages; "json" has no status

    def show(self, status: str, comes_first: bool = False) -> None:
        """Write a status over the one that is there."""
        with self._lock, suppress(OSError):
            if (comes_first or not self._is_kept) and self.log_format == "text":
                begin = "\n" * self._is_mid_line + "\r"
                self._width = shutil.get_terminal_size().columns - 1  # a line that wraps could not be written over
                self._is_mid_line = False
                line = f"tinygpt: {status}"[: self._width].ljust(self._width)
                print(begin + line, end="", file=sys.stderr, flush=True)

    def keep(self, is_kept: bool) -> None:
        """Until it is told otherwise, show nothing but what comes first."""
        self._is_kept = is_kept

    def clear(self, text: str = "\n") -> None:
        """Make room for a text."""
        with self._lock, suppress(OSError):
            if self._width:
                print("\r" + " " * self._width + "\r", end="", file=sys.stderr, flush=True)
            self._width = 0
            self._is_mid_line = not text.endswith("\n") and sys.stdout is not None and sys.stdout.isatty()

    def begin_line(self) -> None:
        """The same for a message, which begins below a text that has not come to the end of its line."""
        with self._lock, suppress(OSError):
            if self._is_mid_line and sys.stderr.isatty():
                print(file=sys.stderr)
            self.clear()

    def end_line(self) -> None:
        """Let the status stay where it is, and go on below."""
        with self._lock, suppress(OSError):
            print(file=sys.stderr, flush=True)
            self._width = 0


SCREEN = Screen()  # as there is one stderr


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def say_truncated(count: int) -> None:
    """Said even where it was asked for."""
    if count:
        say(f"the first {counted(count, 'token')} of the prompt had no room in the model's positions: left out")


def put(text: str = "", end: str = "\n", file: TextIO | None = None) -> None:
    """Text on stdout, at once; or on `file`, which was stdout before. TinyGPTError where it cannot be written, and
    BrokenPipeError if its reader has left."""
    SCREEN.clear(text + end)
    try:
        print(text, end=end, flush=True, file=file)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise TinyGPTError(f"stdout cannot be written ({error.strerror}): fix that, or send it elsewhere.") from None


def say(message: str) -> None:
    SCREEN.begin_line()
    with suppress(OSError):  # a full disk, or a reader that left: no reason to end the work
        print(line(message), file=sys.stderr, flush=True)


def line(message: str, level: str = "info") -> str:
    """A message as stderr has it: for people, or within `lines_in("json")` as one JSON object."""
    if SCREEN.log_format == "json":
        return json.dumps({"time": time.time(), "level": level, "message": message})
    return f"tinygpt: {'error: ' * (level == 'error')}{message}"


@contextmanager
def lines_in(log_format: str) -> Iterator[None]:
    """In the block, whatever is said, logged or reported is a line of "text", or of "json" for programs."""
    before, SCREEN.log_format = SCREEN.log_format, log_format
    try:
        yield
    finally:
        SCREEN.log_format = before


@contextmanager
def log_shown(is_whole: bool) -> Iterator[None]:
    """While the block runs, show what the library logs: warnings alone, or all of it."""
    import logging

    class ToStderr(logging.StreamHandler):
        """To whatever stderr is by then: another stream may stand in for it."""

        stream = property(lambda self: sys.stderr, lambda self, value: None)

        def format(self, record: logging.LogRecord) -> str:
            return line(super().format(record), record.levelname.lower())

    log, handler = logging.getLogger("tinygpt"), ToStderr()
    level = log.level
    handler.addFilter(lambda record: SCREEN.begin_line() or True)  # it takes the place of a status, which goes on below
    log.addHandler(handler)
    log.setLevel(logging.DEBUG if is_whole else level)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


@contextmanager
def elapsed(message: str) -> Iterator[None]:
    """Show `message` while the block runs: with a clock on a terminal, as one line anywhere else."""
    if not sys.stderr.isatty():
        say(message)
        yield
        return
    started, finished = time.perf_counter(), threading.Event()
    clock = threading.Thread(target=_tick, args=(message, started, finished), daemon=True)
    clock.start()
    try:
        yield
    finally:
        finished.set()
        clock.join()
        SCREEN.end_line()


def _tick(message: str, started: float, finished: threading.Event) -> None:
    last = False
    while not last:
        last = finished.wait(0.1)
        SCREEN.show(f"{message}: {time.perf_counter() - started:.1f} s")
