"""StepLock: one Python thread at a time works on the engine; a step that another thread takes serves all of them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tinygpt.errors import RequestError


class StepLock:
    """Like a lock, but who only wants a step taken does not queue for it, and who wants it for other work gets it next.

    tidy: called, by one thread at a time, at the end of each turn and by `tidy` between turns. The condition's own lock
    is held only for moments, and may be taken again by its thread: a garbage collection can close an iterator anywhere.
    """

    def __init__(self, tidy: Callable[[], None]):
        self._tidy = tidy
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._num_ended = 0
        self._num_queued = 0
        self._is_tidying = False

    def begin_or_wait(self) -> bool:
        """Begin a turn; or, where another thread is at work or queues, wait until a turn has ended: then False."""
        with self._changed:
            self.refuse_owner()
            if self._is_free():
                self._owner = threading.get_ident()
                return True
            seen = self._num_ended
            self._changed.wait_for(lambda: self._num_ended != seen or self._is_free())
            return False

    def end(self) -> None:
        """End this thread's turn, if it has one: Ctrl-C may come before or after it has begun."""
        if self._owner != threading.get_ident():
            return
        with self._changed:
            self._owner = None
            self._num_ended += 1
            try:
                self.tidy()
            finally:
                self._changed.notify_all()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """A turn for the block, in front of all who only want a step."""
        self.refuse_owner()
        try:
            self._begin_next()
            yield
        finally:
            self.end()

    def tidy(self) -> None:
        """Tidy now, or leave it to the thread whose turn it is."""
        with self._changed:
            if self._owner is not None or self._is_tidying:
                return
            self._is_tidying = True
            try:
                self._tidy()
            finally:
                self._is_tidying = False

    def refuse_owner(self) -> None:
        """RequestError if it is this thread's turn: it would wait for itself."""
        if self._owner == threading.get_ident():
            raise RequestError(
                "a function that the engine calls during a step may submit requests, but not run them or close the LLM."
            )

    def _begin_next(self) -> None:
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
