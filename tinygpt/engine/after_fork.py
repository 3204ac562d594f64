"""What a forked process does first. Of all threads it has the one that forked alone, and so locks that stay locked.

A step that another thread was taking is never finished there, and what it was about to write is written by halves. So
the child's engine begins idle: whatever ran before goes on in the parent.
"""

import os
from typing import Protocol
from weakref import WeakSet


class BeginsAnew(Protocol):
    def begin_anew(self) -> None:
        """Forget requests, threads and locks. Called in the child, before anything else runs there."""


_live: WeakSet[BeginsAnew] = WeakSet()  # as the standard library's logging has its locks


def call_after_fork(part: BeginsAnew) -> None:
    """Have `begin_anew` called in every child that is forked while `part` lives."""
    _live.add(part)


def _begin_anew() -> None:
    for part in list(_live):
        part.begin_anew()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_begin_anew)
