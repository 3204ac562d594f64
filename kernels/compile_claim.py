"""Which of several processes compiles a kernel: the others wait for it, and find it on the disk."""

import os
import time
from contextlib import suppress
from pathlib import Path

from tinygpt.kernels.compiling import waited_for

try:
    import fcntl
except ImportError:  # Windows: each compiles for itself
    fcntl = None

PATIENCE = 60.0  # seconds for which all other processes together may keep this one waiting
LOOK_EVERY = 0.02  # seconds
# A link or a pipe in the place of a file is neither followed nor waited for.
NO_SURPRISE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class CompileClaim:
    """The claim of this process, one at a time, to compile what a file is to hold: a locked file beside it.

    The system unlocks it when the process ends, however that comes. Where no file can be made or locked, nobody waits.
    """

    def __init__(self):
        self._path: Path | None = None
        self._descriptor: int | None = None
        self._patience = PATIENCE

    def take(self, path: Path) -> None:
        """Returns when this process may compile what goes into the file at `path`, or has waited long enough.

        The caller looks whether it is there by then. A claim that was taken before ends.
        """
        self.end()
        if fcntl is None:
            return
        self._path = path.with_name(f"{path.name}.lock")
        with suppress(OSError):
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | NO_SURPRISE, 0o600)
            if not _is_locked(self._descriptor):
                self._wait(path.name)

    def end(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                self._path.unlink()  # whoever waits has it open, and finds the kernel
            os.close(self._descriptor)
            self._descriptor = None

    def _wait(self, name: str) -> None:
        began = time.monotonic()
        is_ours = False
        try:
            with waited_for(name):
                while not is_ours and time.monotonic() - began < self._patience:
                    time.sleep(LOOK_EVERY)
                    is_ours = _is_locked(self._descriptor)
        finally:
            if not is_ours:  # or the wait was broken off
                os.close(self._descriptor)  # and leaves the file to its owner
                self._descriptor = None
        self._patience -= time.monotonic() - began


def _is_locked(descriptor: int) -> bool:
    """Whether this process has the lock now. OSError: there are none on this disk."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
