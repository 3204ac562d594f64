"""Workers in processes of their own: given ranges of inputs, heard, and started again when an input kills one."""

import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection

from .cases import Case, Input, case_of
from .worker import Limits, Outcome, Range, Several, work

SILENCE = 120  # seconds on the clock without a word: a worker that waits for something, which takes no CPU time
KEPT = 2  # inputs of each finding


@dataclass
class Report:
    """What came of a campaign: outcomes by format and kind, and the first inputs of each finding."""

    counts: Counter = field(default_factory=Counter)
    findings: dict[tuple[str, str], list[tuple[Case, Outcome]]] = field(default_factory=dict)

    def add(self, case: Case, outcome: Outcome) -> bool:
        """Whether this is a finding that was not known."""
        self.counts[case.format, outcome.kind] += 1
        if outcome.kind != "finding":
            return False
        known = self.findings.setdefault((case.format, outcome.what), [])
        if len(known) < KEPT:
            known.append((case, outcome))
        return len(known) == 1


class Worker:
    """A process that runs inputs. `number` and `state` are the last input's and what became of it."""

    def __init__(self, limits: Limits, patch: Callable[[], None] | None = None):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([f"{__package__}.worker"])  # the libraries are imported once
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, limits, patch), daemon=True)
        self.process.start()
        theirs.close()
        self.number, self.state, self.is_done, self.last_word = -1, "starts", False, time.monotonic()

    def give(self, job: Range | Several) -> None:
        self.is_done, self.last_word = False, time.monotonic()
        self.pipe.send(job)

    def hear(self) -> tuple[int, Outcome] | None:
        """An outcome, if one is there. EOFError after the last input of the job, or where the process has died."""
        message = self.pipe.recv()
        self.last_word = time.monotonic()
        if message is None:
            self.is_done = True
            raise EOFError
        self.number, self.state = message
        return message if isinstance(self.state, Outcome) else None

    def death(self) -> Outcome | None:
        """What the process died of, as the outcome of its last input; None where its job is done."""
        if self.is_done:
            return None
        if self.is_silent():
            self.process.kill()
        self.process.join()
        code = self.process.exitcode
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        if self.state == "is judged":
            return Outcome("unjudged", detail=f"the independent reader died of it ({how})")
        if self.state != "loads":
            raise RuntimeError(f"a worker died before an input was damaged ({how}): its message is above.")
        words = {-signal.SIGPROF: "takes too long", -signal.SIGKILL: "waits or takes all memory"}
        return Outcome("finding", words.get(code, f"the process dies: {how}"))

    def is_silent(self) -> bool:
        return time.monotonic() - self.last_word > SILENCE

    def close(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


@dataclass(frozen=True)
class Campaign:
    """Inputs 0 to `inputs` of a seed, or all that `seconds` allow, by so many workers."""

    seed: int
    formats: tuple[str, ...]
    inputs: int | None
    seconds: float | None
    workers: int
    limits: Limits = field(default_factory=Limits)
    patch: Callable[[], None] | None = None

    def run(self, on_news: Callable[[Case, Outcome], None] = lambda case, outcome: None) -> Report:
        report, ends = Report(), None if self.seconds is None else time.monotonic() + self.seconds
        busy = {worker.pipe: worker for worker in map(self._start, range(self.workers))}
        try:
            while busy and (ends is None or time.monotonic() < ends):
                for pipe in connection.wait([*busy], timeout=1):
                    self._hear(busy, busy[pipe], report, on_news)
                for worker in [worker for worker in busy.values() if worker.is_silent()]:
                    self._replace(busy, worker, report, on_news)
        finally:
            for worker in busy.values():
                worker.close()
        return report

    def _start(self, start: int) -> Worker:
        worker = Worker(self.limits, self.patch)
        worker.give(Range(self.seed, self.formats, start, self.workers, self.inputs))
        return worker

    def _hear(self, busy: dict, worker: Worker, report: Report, on_news: Callable) -> None:
        try:
            if heard := worker.hear():
                self._note(report, *heard, on_news)
        except (EOFError, ConnectionResetError):
            self._replace(busy, worker, report, on_news)

    def _replace(self, busy: dict, worker: Worker, report: Report, on_news: Callable) -> None:
        """The worker has ended: go on behind the input that killed it, if one did."""
        outcome = worker.death()
        del busy[worker.pipe]
        worker.close()
        if outcome is not None:
            self._note(report, worker.number, outcome, on_news)
            successor = self._start(worker.number + self.workers)
            busy[successor.pipe] = successor

    def _note(self, report: Report, number: int, outcome: Outcome, on_news: Callable) -> None:
        case = case_of(self.seed, number, self.formats)
        if report.add(case, outcome):
            on_news(case, outcome)


class Judge:
    """Runs inputs one at a time, for whoever wants to know at once; whatever they do, it survives."""

    def __init__(self, limits: Limits, patch: Callable[[], None] | None = None):
        self._limits, self._patch = limits, patch
        self._worker = Worker(limits, patch)

    def outcome(self, given: Case | Input) -> Outcome:
        worker = self._worker
        worker.give(Several((given,)))
        outcome = None
        try:
            while worker.pipe.poll(SILENCE):
                outcome = worker.hear() or outcome
        except (EOFError, ConnectionResetError):
            pass
        if outcome is not None:
            return outcome[1]
        death = worker.death()
        worker.close()
        self._worker = Worker(self._limits, self._patch)
        return death

    def close(self) -> None:
        self._worker.close()
