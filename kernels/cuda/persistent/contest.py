"""Contest: two ways to the same tokens, of which a GPU takes the faster one."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

WARM_UPS = 2  # rounds in which kernels are compiled and graphs captured
ROUNDS = 3  # that count


@dataclass
class Contest:
    """The first calls go both ways, and return what the usual one gives; then the faster one is taken for good.

    The other way is out, with a RuntimeWarning, as soon as it gives another token. An error is nothing that one could
    go on from: after an illegal access the GPU refuses whatever is asked of this process.
    """

    usual: Callable[..., np.ndarray]
    other: Callable[..., np.ndarray]
    winner: Callable[..., np.ndarray] | None = None
    seconds: list[tuple[float, float]] = field(default_factory=list)

    def run(self, *arguments: Any) -> np.ndarray:
        if self.winner is not None:
            return self.winner(*arguments)
        expected, usual = _timed(self.usual, *arguments)
        found, other = _timed(self.other, *arguments)
        if not np.array_equal(found, expected):
            self.winner = self.usual
            report = "another one is used. Please report this with `tinygpt doctor`."
            message = f"a kernel of tinygpt gives other tokens on this GPU; {report}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return expected
        self.seconds.append((usual, other))
        if len(self.seconds) == WARM_UPS + ROUNDS:
            usual, other = np.median(self.seconds[WARM_UPS:], axis=0)
            self.winner = self.other if other < usual else self.usual
        return expected


def _timed(way: Callable[..., np.ndarray], *arguments: Any) -> tuple[np.ndarray, float]:
    started = time.perf_counter()
    token_ids = way(*arguments)
    return token_ids, time.perf_counter() - started
