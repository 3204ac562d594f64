"""Graphs: what a step queues, captured once for each kind of step and from then on queued by one call."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

MAX_GRAPHS = 64  # each keeps some 100 kB of the GPU's memory


@dataclass
class Graphs:
    """The first step of a kind queues its kernels one by one, and so compiles them; the second is captured."""

    device: Any
    _captured: dict[Hashable, Callable[[], None] | None] = field(default_factory=dict)

    def run(self, kind: Hashable, step: Callable[[], None]) -> None:
        """Queue what `step` queues, which is the same for every step of this kind."""
        if kind not in self._captured:
            step()
            while len(self._captured) >= MAX_GRAPHS:
                del self._captured[next(iter(self._captured))]  # the oldest
            self._captured[kind] = None
            return
        if self._captured[kind] is None:
            self._captured[kind] = self.device.capture(step)
        self._captured[kind]()
