"""What a command says on stderr while kernels compile, whichever command it is and whatever it is doing."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tinygpt.cli.output import messages
from tinygpt.cli.output.messages import SCREEN, counted, say
from tinygpt.kernels.compiling import ANNOUNCER

MESSAGE = "compiling kernels for this machine"
OUTLOOK = "some 10 s, once for each dtype and kind of request"
TICK = 0.1  # seconds


@contextmanager
def compiling_shown(has_figures: bool = True) -> Iterator[None]:
    """Say in the block that kernels compile, and at its end how many did and how long that took.

    has_figures: whether the block says how long other things took.
    """
    notice, num_kept = CompileNotice(), ANNOUNCER.num_kept
    try:
        with ANNOUNCER.told(notice):
            yield
    finally:
        notice.close()
    if notice.num_kernels:
        kernels, seconds = counted(notice.num_kernels, "kernel"), notice.seconds
        outlook = "; the next run has them" if ANNOUNCER.num_kept - num_kept >= notice.num_kernels else ""
        apart = ", which no other figure contains" * has_figures
        say(f"{kernels} compiled in {seconds:.1f} s{apart}{outlook}")


class CompileNotice:
    """A line at the beginning, and then the seconds: on a terminal in a line that goes on until something else is
    written, elsewhere in a line for each INTERVAL. How many kernels there are is known at the end alone."""

    def __init__(self):
        self.num_kernels = 0
        self.seconds = 0.0  # until the last time that none compiled any more
        self._told = 0.0  # of these, when a line was written last
        self._num_open = 0  # kernels under way: one of this process, and one that another process is waited for
        self._began = 0.0
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._clock = threading.Thread(target=self._tick, daemon=True)

    def begin(self, name: str) -> None:
        with self._lock:
            self.num_kernels += 1
            self._num_open += 1
            if self._num_open == 1:
                self._began = time.perf_counter()
                SCREEN.keep(True)
            if self.num_kernels == 1:
                say(f"{MESSAGE} ({OUTLOOK})")
                self._clock.start()

    def end(self) -> None:
        with self._lock:
            self._num_open -= 1
            if not self._num_open:
                self.seconds += time.perf_counter() - self._began
                SCREEN.keep(False)

    def close(self) -> None:
        self._is_over.set()
        if self._clock.is_alive():
            self._clock.join()
        SCREEN.clear()

    def _tick(self) -> None:
        while not self._is_over.wait(TICK):
            with self._lock:
                if self._num_open:
                    self._show(self.seconds + time.perf_counter() - self._began)

    def _show(self, seconds: float) -> None:
        if sys.stderr.isatty():
            SCREEN.show(f"{MESSAGE}: {seconds:.1f} s so far", comes_first=True)
        elif seconds - self._told >= messages.INTERVAL:
            self._told = seconds
            say(f"{MESSAGE}: {seconds:.1f} s so far")
