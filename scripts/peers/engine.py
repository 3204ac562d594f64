"""What every engine does for the benchmark, in milliseconds, greedily, whatever token comes out."""

import time
from collections.abc import Callable


class SteppingEngine:
    """An engine whose loop is ours: a subclass gives `start` and `step`.

    start(ids): the pass over the prompts, ids of shape (batch, prompt), up to each sequence's next token.
    step(): one more token for each sequence.
    """

    def prefill_ms(self, ids: list[list[int]]) -> float:
        return milliseconds(lambda: self.start(ids))

    def step_ms(self, ids: list[list[int]], new: int) -> float:
        """Of a step, the prompt pass left out."""
        self.start(ids)

        def run() -> None:
            for _ in range(new - 1):
                self.step()

        return milliseconds(run) / (new - 1)


def milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)
