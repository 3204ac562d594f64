"""What a torch engine is to the benchmark, and the timing of all."""

import time
from collections.abc import Callable
from typing import Any, Protocol

from .cases import PREFILL_TOKENS, Case

MIN_REPEATS = 3
SECONDS_OF_REPEATS = 5.0  # after which no more than MIN_REPEATS are made


class SteppingEngine(Protocol):
    """An engine whose loop is ours. `close` gives its memory back."""

    def start(self, token_ids: list[list[int]], num_steps: int) -> None:
        """Read the prompts, up to each sequence's next token, with room for num_steps more."""

    def step(self) -> None:
        """One more token for each sequence; need not wait for it."""

    def wait(self) -> None:
        """Until all that was begun is done."""

    def close(self) -> None: ...


def measure(engine: SteppingEngine, case: Case, vocab_size: int, steps: int, repeats: int) -> list[float]:
    """Milliseconds of a step, or of the prefill, of every repeat; a first, which compiles and warms up, is left out."""

    def prefill_ms(repeat: int) -> float:
        token_ids = case.prompts(PREFILL_TOKENS, vocab_size, seed=repeat)
        return milliseconds(lambda: (engine.start(token_ids, 0), engine.wait()))

    def step_ms(repeat: int) -> float:
        """The mean of `steps` steps around the context; two before them warm up."""
        engine.start(case.prompts(case.context - steps // 2 - 2, vocab_size, seed=repeat), steps + 2)
        take_steps(engine, 2)
        return milliseconds(lambda: take_steps(engine, steps)) / steps

    return repeated(prefill_ms if case.is_prefill else step_ms, repeats)


def take_steps(engine: SteppingEngine, num: int) -> None:
    for _ in range(num):
        engine.step()
    engine.wait()


def repeated(run: Callable[[int], float], repeats: int) -> list[float]:
    """run(0) is a warm-up; run(1) and so on count, until there are enough or they have taken long enough."""
    run(0)
    found: list[float] = []
    begin = time.perf_counter()
    while len(found) < repeats:
        found.append(run(len(found) + 1))
        if len(found) >= MIN_REPEATS and time.perf_counter() - begin > SECONDS_OF_REPEATS:
            break
    return found


def milliseconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begin)
