"""SIGTERM, as a batch system sends it: an exception like Ctrl-C's, so that what is done is kept and nothing stays."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM has come. Who stops for Ctrl-C stops for this."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """In the block, the first SIGTERM raises Terminated. Others are ignored: the cleaning up would be broken off."""
    if threading.current_thread() is not threading.main_thread():  # which alone may set a handler
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
