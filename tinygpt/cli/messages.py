"""What a command says on stderr, beside its text on stdout."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tinygpt.errors import TinyGPTError


@dataclass(frozen=True)
class Speed:
    """How fast tokens were made. `first_token`: seconds until the first one; None where several prompts ran."""

    tokens: int
    seconds: float
    first_token: float | None = None

    def __str__(self) -> str:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        text = f"{counted(self.tokens, 'token')} in {self.seconds:.2f} s, {rate:.1f} tokens/s"
        return text if self.first_token is None else f"{text}, first token after {self.first_token:.3f} s"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def say_truncated(count: int) -> None:
    """Said even where it was asked for."""
    if count:
        say(f"the first {counted(count, 'token')} of the prompt did not fit the positions and was not read")


def put(text: str = "", end: str = "\n") -> None:
    """Text on stdout, at once. TinyGPTError where it cannot be written, and BrokenPipeError if its reader has left."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise TinyGPTError(f"stdout cannot be written ({error.strerror}): mend that, or send it elsewhere.") from None


def say(message: str) -> None:
    with suppress(OSError):  # a full disk, or a reader that left: no reason to end the work
        print(f"tinygpt: {message}", file=sys.stderr, flush=True)


@contextmanager
def log_shown(is_whole: bool) -> Iterator[None]:
    """While the block runs, show what the library logs: warnings alone, or all of it."""
    import logging

    log, handler = logging.getLogger("tinygpt"), logging.StreamHandler()
    level = log.level
    # On a terminal it takes the place of the clock's line, which goes on below.
    handler.setFormatter(logging.Formatter(f"{chr(13) * sys.stderr.isatty()}tinygpt: %(message)s"))
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
        with suppress(OSError):
            print(file=sys.stderr, flush=True)


def _tick(message: str, started: float, finished: threading.Event) -> None:
    last = False
    while not last:
        last = finished.wait(0.1)
        with suppress(OSError):
            print(f"\rtinygpt: {message}: {time.perf_counter() - started:.1f} s", end="", file=sys.stderr, flush=True)
