"""StepLock: one Python thread at a time works on the engine; a step that another thread takes serves all of them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tinygpt.errors import RequestError


class StepLock:
    """A lock for which nobody queues who only wants a step taken, and which other work gets before the next step.

    tidy: called, by one thread at a time, at each release and by `tidy` while the lock is free. The condition's own
    lock is held only for moments, and its thread may acquire it again: a garbage collection can close an iterator
    anywhere.
    """

    def __init__(self, tidy: Callable[[], None]):
        self._tidy = tidy
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._num_releases = 0
        self._num_queued = 0
        self._is_tidying = False

    def acquire_or_wait(self) -> bool:
        """Acquire the lock; or, where another thread has it or queues for it, wait for a release: then False."""
        with self._changed:
            self.refuse_owner()
            if self._is_free():
                self._owner = threading.get_ident()
                return True
            seen = self._num_releases
            self._changed.wait_for(lambda: self._num_releases != seen or self._is_free())
            return False

    def release(self) -> None:
        """Release the lock, if this thread has it: Ctrl-C may come before or after it was acquired."""
        if self._owner != threading.get_ident():
            return
        with self._changed:
            self._owner = None
            self._num_releases += 1
            try:
                self.tidy()
            finally:
                self._changed.notify_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the lock for the block, ahead of all who only want a step."""
        self.refuse_owner()
        try:
            self._acquire_next()
            yield
        finally:
            self.release()

    def tidy(self) -> None:
        """Tidy now, or leave it to the thread that has the lock."""
        with self._changed:
            if self._owner is not None or self._is_tidying:
                return
            self._is_tidying = True
            try:
                self._tidy()
            finally:
                self._is_tidying = False

    def refuse_owner(self) -> None:
        """RequestError if this thread has the lock: it would wait for itself."""
        if self._owner == threading.get_ident():
            raise RequestError(
                "a function that the engine calls during a step may submit requests, but not run them or close the LLM."
            )

    def _acquire_next(self) -> None:
        with self._changed:
            self._num_queued += 1
            try:
                self._changed.wait_for(lambda: self._owner is None)
                self._owner = threading.get_ident()
            finally:  # Ctrl-C may end the waiting
                self._num_queued -= 1
                self._changed.notify_all()

    def _is_free(self) -> bool:
        return self._owner is None and not self._num_queued
