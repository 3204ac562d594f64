"""An engine that takes steps, and a function that returns, only as the test allows; and calls that are noted."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from support.processes import until

SECONDS = 60


class Gate:
    """Stands in front of a runner: `with llm.engine.wrapped(Gate) as gate`."""

    def __init__(self, runner: Any):
        self._runner = runner
        self._changed = threading.Condition()
        self._num_allowed = 0.0
        self.num_asked = self.num_taken = 0  # steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def choose_num_steps(self, num_sequences: int, num_in_time: int) -> int:
        return 1

    def forward(self, batch: Any, *look: Any) -> Any:
        with self._changed:
            self.num_asked += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.num_taken < self._num_allowed, SECONDS), (
                "no step was allowed"
            )
            self.num_taken += 1
        return self._runner.forward(batch, *look)

    def allow(self, count: float) -> None:
        with self._changed:
            self._num_allowed += count
            self._changed.notify_all()

    def wait_until_asked(self, count: int) -> None:
        """Until the engine wants to take its `count`-th step, all before it being done."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_asked >= count, SECONDS)


class Held:
    """In place of a function: says when it is called, and does its work when it is released."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self.called = threading.Event()
        self.release = threading.Event()

    def __call__(self, *arguments: Any) -> Any:
        self.called.set()
        assert self.release.wait(SECONDS), "it was not released"
        return self._function(*arguments)


def noting(patch: Any, owner: Any, name: str, note: Callable[..., Any] = lambda *given: given) -> list[Any]:
    """Return a list that grows by the note of each call of the owner's function."""
    found, function = [], getattr(owner, name)

    def noted(*given: Any, **named: Any) -> Any:
        found.append(note(*given))
        return function(*given, **named)

    patch.setattr(owner, name, noted)
    return found


@contextmanager
def paused(llm: Any) -> Iterator[None]:
    """Keep the engine's thread between two steps for the block."""
    has_come = threading.Event()
    may_go = threading.Event()

    def pause() -> None:
        has_come.set()
        may_go.wait(SECONDS)

    thread = threading.Thread(target=llm.engine.call, args=(pause,))
    thread.start()
    assert has_come.wait(SECONDS)
    try:
        yield
    finally:
        may_go.set()
        thread.join()


def until_idle(llm: Any) -> None:
    until(lambda: not llm.engine.scheduler.running and not llm.engine.scheduler.waiting)


def assert_idle(llm: Any) -> None:
    """Assert that the engine has no sequence and all its 4 slots."""
    with paused(llm):
        scheduler = llm.engine.scheduler
        assert (scheduler.running, len(scheduler.waiting), scheduler.slots.num_free) == ([], 0, 4)
