"""One dtype's engines side by side: first whether they run the same model, then their times, in turns."""

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path

from .cases import Case
from .catalogue import MACHINE
from .prepare import Setup
from .processes import PeerError, Worker
from .progress import say
from .table import Row

PAUSE = 0.3  # seconds: longer than the 0.2 s that OpenMP threads may spin for when they have nothing to do
AGREEMENT_PROMPT = 50


class Engines:
    """The processes of one dtype: only they are in memory. One that fails is absent from then on."""

    def __init__(self, setup: Setup, dtype: str, threads: int, logs: Path, kv_cache_dtype: str | None = None):
        self.dtype, self.config, self.absent = dtype, setup.config, setup.absent
        self.limits: list[dict[str, float]] = []  # of the machine, turn by turn
        self._workers = {}
        logs.mkdir(parents=True, exist_ok=True)
        for (engine, kind), place in setup.places.items():
            if kind == dtype:
                log = logs / f"{place.peer.module}-{dtype}.log"
                self._workers[engine] = Worker(
                    place.python, place.peer, place.folder, dtype, threads, log, kv_cache_dtype
                )

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *exception) -> None:
        for worker in self._workers.values():
            worker.close()

    def last_logits(self) -> Iterator[tuple[str, list[float]]]:
        """(engine, its logits after one prompt), to see whether all run the same model."""
        ids = self._token_ids(1, AGREEMENT_PROMPT)[0]
        for engine in self._names():
            logits = None
            with self._absent_on_error(engine):
                logits = self._workers[engine].call("last_logits", ids=ids)
            if logits is not None:
                yield engine, logits

    def measure(self, case: Case, repeats: int) -> Row:
        """Each engine in turn, `repeats` times after a warm-up, which compiles and touches memory first."""
        row = Row(case, self.dtype, {engine: [] for engine in self._names()})
        for turn in range(1 + repeats):
            for engine in self._names():
                time.sleep(PAUSE)
                with self._absent_on_error(engine):
                    took = self._run(engine, case)
                    row.ms[engine] += [took] * (turn > 0)
            if MACHINE.name in self._workers:
                time.sleep(PAUSE)
                with self._absent_on_error(MACHINE.name):
                    self.limits.append(self._workers[MACHINE.name].call("limits"))
        return row

    def _run(self, engine: str, case: Case) -> float:
        ids = self._token_ids(case.batch, case.prompt)
        if case.is_prefill:
            return self._workers[engine].call("prefill_ms", ids=ids)
        return self._workers[engine].call("step_ms", ids=ids, new=case.new)

    def _names(self) -> list[str]:
        return [name for name in self._workers if name != MACHINE.name]

    @contextlib.contextmanager
    def _absent_on_error(self, engine: str) -> Iterator[None]:
        try:
            yield
        except PeerError as error:
            self.absent[engine, self.dtype] = str(error)
            say(f"{engine} {self.dtype} is absent: {error}")
            self._workers.pop(engine).close()

    def _token_ids(self, batch: int, prompt: int) -> list[list[int]]:
        generator = random.Random(0)
        return [[generator.randrange(self.config["vocab_size"]) for _ in range(prompt)] for _ in range(batch)]
