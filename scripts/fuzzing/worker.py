"""Runs inputs one after another under limits of time and memory. One that kills the process is known to the parent."""

import faulthandler
import os
import re
import resource
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tinygpt.errors import TinyGPTError

from .cases import Case, Input, case_of
from .formats import FORMATS, Format
from .guard import PROJECT, Guard
from .oracles import NoWord


@dataclass(frozen=True)
class Limits:
    """What a load may take: seconds of CPU time and bytes of memory beyond what the process has, and more for a large
    file: so many seconds and bytes for each of its bytes."""

    seconds: float = 3.0
    memory: int = 256 * 2**20
    seconds_per_byte: float = 5e-6
    memory_per_byte: int = 64


@dataclass(frozen=True)
class Outcome:
    """kind: "right", "refused", "unjudged" (loaded, and the independent reader has no word) or "finding".

    what: a few words that are equal for one cause; detail: the message, or a traceback.
    """

    kind: str
    what: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Range:
    """Every `step`-th input of a campaign from `start` on, `stop` not included; without it, for ever."""

    seed: int
    formats: tuple[str, ...]
    start: int
    step: int
    stop: int | None

    def cases(self) -> Iterator[tuple[int, Case]]:
        numbers = count(self.start, self.step) if self.stop is None else range(self.start, self.stop, self.step)
        return ((i, case_of(self.seed, i, self.formats)) for i in numbers)


@dataclass(frozen=True)
class Several:
    """Inputs that are given one by one."""

    inputs: tuple[Case | Input, ...]

    def cases(self) -> Iterator[tuple[int, Case | Input]]:
        return iter(enumerate(self.inputs))


def work(connection: Connection, limits: Limits, patch: Any = None) -> None:
    """Runs jobs until the parent closes the connection. Sends (number, "loads"), (number, "is judged") and (number,
    Outcome) for each input, and None after the last.

    patch: a function that is called first: it may break a loader, to see whether that is found.
    """
    faulthandler.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    warnings.simplefilter("ignore")
    if patch is not None:
        patch()
    with tempfile.TemporaryDirectory(prefix="tinygpt-fuzz-") as folder, suppress(EOFError, BrokenPipeError):
        bench = Bench(Path(folder), limits)
        while True:
            job: Range | Several = connection.recv()
            for number, case in job.cases():
                outcome = bench.run(case, lambda state, number=number: connection.send((number, state)))
                connection.send((number, outcome))
            connection.send(None)


class Bench:
    """Folders of undamaged files, in which one file after another is replaced by a damaged one."""

    def __init__(self, root: Path, limits: Limits):
        self._root, self._limits, self._guard = root, limits, Guard()
        self._places: dict[str, tuple[Mapping[str, bytes], Any]] = {}
        root.mkdir(exist_ok=True)
        # Beside every folder, in case something asks for it by a relative path.
        (root / "canary").write_bytes(b"canary")

    def undamaged(self, format: Format) -> tuple[Mapping[str, bytes], Any]:
        """Its files, which now lie in its folder, and what they load as."""
        if format.name not in self._places:
            files, folder = dict(format.files()), self._root / format.name
            folder.mkdir(exist_ok=True)
            for name, content in files.items():
                _replace(folder / name, content)
            self._places[format.name] = files, format.load(folder)
        return self._places[format.name]

    def run(self, case: Case | Input, tell: Callable[[str], None] = lambda state: None) -> Outcome:
        """What becomes of an input. tell: is called with "loads" and "is judged" before these begin."""
        format = FORMATS[case.format]
        files, undamaged = self.undamaged(format)
        given = case if isinstance(case, Input) else case.input(files[case.file])
        folder = self._root / format.name
        path = folder / given.file
        _replace(path, given.data)
        tell("loads")
        try:
            loaded, outcome = self._load(format, folder, len(given.data))
            if outcome is not None:
                return outcome
            tell("is judged")
            problem = format.check(folder, loaded, undamaged)
        except NoWord as error:
            return Outcome("unjudged", detail=str(error))
        except Exception as error:  # what was loaded is not even of the form that it should have
            return Outcome(
                "finding", f"wrong: {type(error).__name__} in {_place(error)}", traceback.format_exc(limit=-3)
            )
        finally:
            for name in files if format.is_writing else (given.file,):
                _replace(folder / name, files[name])
        return Outcome("right") if problem is None else Outcome("finding", f"wrong: {_words(problem)}", problem)

    def _load(self, format: Format, folder: Path, size: int) -> tuple[Any, Outcome | None]:
        loaded, outcome = None, None
        try:
            with _limited(self._limits, size), self._guard.watching(folder, format.is_writing):
                loaded = format.load(folder)
        except TinyGPTError as error:
            outcome = Outcome("refused" if str(error).strip() else "finding", detail=str(error))
        except Exception as error:
            outcome = Outcome("finding", f"{type(error).__name__} in {_place(error)}", traceback.format_exc(limit=-12))
        if self._guard.violations:
            what = self._guard.violations[0]
            outcome = Outcome("finding", f"reached outside: {_words(what)}", "\n".join(self._guard.violations))
        return loaded, outcome


def _replace(path: Path, data: bytes) -> None:
    """By renaming: what is mapped into memory from the file before stays as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name("new")
    new.touch(mode=0o600)
    new.write_bytes(data)
    new.replace(path)


@contextmanager
def _limited(limits: Limits, size: int) -> Iterator[None]:
    """Beyond the time, the kernel kills this process; beyond the memory, allocations fail."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (in_use + limits.memory + size * limits.memory_per_byte, hard))
    signal.setitimer(signal.ITIMER_PROF, limits.seconds + size * limits.seconds_per_byte)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _place(error: BaseException) -> str:
    """The project's innermost function that the error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(PROJECT)]
    frame = (ours or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.name}"


def _words(text: str) -> str:
    """Without what differs from input to input."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|[-\d.]+|/\S+", "_", " ".join(text.split()))[:60]
