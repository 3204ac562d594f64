"""Single calls that fail: the nth file opened or mapped, the nth array, the nth write; and too little memory."""

import builtins
import contextlib
import errno
import io
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from random import Random

import numpy as np

from .lab import PROMPT, Lab, Run, finish

EVENTS = ("open", "mmap.__new__", "os.mkdir", "os.rename", "os.truncate", "os.scandir", "os.listdir", "os.remove")
ARRAYS = ("empty", "zeros", "ones", "full", "array", "concatenate", "frombuffer", "ascontiguousarray", "arange")

CALLS_A_TRIAL = 8


class Fault:
    """Lets `number` - 1 calls pass and fails the next one. Only calls of this package's own code count."""

    def __init__(self, number: int):
        self.left, self.is_on = number, False

    def hit(self) -> bool:
        if not self.is_on:
            return False
        self.left -= 1
        return self.left == 0

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False


def is_import() -> bool:
    """Whether a module is being read: without the program's own files there is no program."""
    frame = sys._getframe(1)
    while frame is not None:
        if "importlib" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def fail_files(fault: Fault, number: int) -> None:
    def hook(event: str, arguments) -> None:
        if event in EVENTS and not is_import() and fault.hit():
            raise OSError(number, os.strerror(number), arguments[0] if isinstance(arguments[0], str) else None)

    sys.addaudithook(hook)


def fail_arrays(fault: Fault, number: int) -> None:
    """MemoryError from the functions that make arrays, for callers in this package."""

    def failing(plain):
        def function(*arguments, **named):
            if sys._getframe(1).f_globals.get("__name__", "").startswith("tinygpt") and fault.hit():
                raise MemoryError("Unable to allocate")
            return plain(*arguments, **named)

        return function

    for name in ARRAYS:
        setattr(np, name, failing(getattr(np, name)))


def fail_writes(fault: Fault, number: int) -> None:
    """os.write, os.fsync, and what files do that are opened from now on."""

    def failing(plain):
        def function(*arguments):
            if fault.hit():
                raise OSError(number, os.strerror(number))
            return plain(*arguments)

        return function

    os.write, os.fsync = failing(os.write), failing(os.fsync)
    plain_open = builtins.open

    def opened(file, mode="r", *arguments, **named):
        stream = plain_open(file, mode, *arguments, **named)
        if set(mode) & set("wax+") and isinstance(file, (str, os.PathLike)):
            with contextlib.suppress(AttributeError):
                stream.write = failing(stream.write)
        return stream

    builtins.open = io.open = opened


FAULTS = {
    "files": (fail_files, (errno.EIO, errno.ENOMEM, errno.ENOSPC, errno.EACCES, errno.EMFILE)),
    "arrays": (fail_arrays, (errno.ENOMEM,)),
    "writes": (fail_writes, (errno.EIO, errno.ENOSPC)),
}


def in_child(work: Callable[[], str | None]) -> str | None:
    """What `work` returns in a forked process: its faults stay there."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(200)
        try:
            said = work() or ""
        except BaseException:
            said = traceback.format_exc()
        with open(writer, "w") as pipe:
            pipe.write(said)
            pipe.flush()
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return said or (f"exit code {code}" if code else None)


def run_here(arguments: tuple[str, ...], fault: Fault, fail: Callable[[], None]) -> Run:
    """The command in this process, with the fault armed."""
    from tinygpt.cli.main import main

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        sys.stdout, sys.stderr = out, err
        fail()
        with fault.armed():
            code = main(arguments)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        texts = []
        for stream in (out, err):
            stream.flush()
            stream.seek(0)
            texts.append(stream.read())
    return Run(code, *texts)


def injected(name: str, kind: str, arguments_of: Callable[[Lab], tuple], expected_of: Callable[[Lab], str]):
    """A scenario: the nth call of a kind fails in a command; n is counted up from one trial to the next."""

    fail, numbers = FAULTS[kind]

    def try_nth(lab: Lab, expected: str, nth: int, number: int) -> tuple[str, bool]:
        """What was wrong, and whether there are fewer than n calls."""
        fault, arguments = Fault(nth), arguments_of(lab)

        def work() -> str:
            problem = run_here(arguments, fault, lambda: fail(fault, number)).problem(expected) or ""
            return "over\n" * (fault.left > 0) + problem

        said = in_child(work) or ""
        return said.removeprefix("over\n"), said.startswith("over\n")

    def scenario(lab: Lab, generator: Random) -> str | None:
        import tinygpt.llm  # noqa: F401, in the parent, so that each child begins with it

        name, expected = scenario.__name__, expected_of(lab)
        for _ in range(CALLS_A_TRIAL):
            nth = lab.next_of(name)
            number = numbers[(nth + lab.rounds[name]) % len(numbers)]
            problem, is_over = try_nth(lab, expected, nth, number)
            if is_over:
                lab.rounds[name] += 1
                lab.counts[name] = 0
            if problem:
                return f"{kind} number {nth} failed with {errno.errorcode[number]}: {problem}"
        return None

    scenario.__name__ = f"{kind}_in_{name}"
    return scenario


def generate_arguments(lab: Lab) -> tuple[str, ...]:
    return PROMPT


def converted_arguments(lab: Lab) -> tuple[str, ...]:
    return (*PROMPT, "--model", str(lab.converted))


def batch_arguments(lab: Lab) -> tuple[str, ...]:
    return lab.batch(lab.new_folder() / "out.jsonl")


def convert_arguments(lab: Lab) -> tuple[str, ...]:
    return ("convert", str(lab.tiny), str(lab.new_folder() / "int8"))


COMMANDS = {
    "generate": (generate_arguments, lambda lab: lab.text),
    "converted": (converted_arguments, lambda lab: lab.converted_text),
    "batch": (batch_arguments, lambda lab: lab.records and ""),
    "convert": (convert_arguments, lambda lab: ""),
}

# A session that is saved, and generated with again after the fault.
SESSION = """
import errno, os, sys
from pathlib import Path
from random import Random
from scripts.scenarios.injected import FAULTS, Fault
from tinygpt import LLM, SamplingParams
from tinygpt.errors import TinyGPTError

folder, seed = Path(sys.argv[1]), int(sys.argv[2])
generator, params = Random(seed), SamplingParams(max_tokens=8, seed=3)
llm = LLM("demo")
session = llm.session()
session.extend("Once upon")
expected = session.generate(params).outputs
session.save(folder / "old")
faults = [(Fault(1), *FAULTS[kind]) for kind in FAULTS]
for fault, fail, _ in faults:
    fail(fault, errno.EIO)
for _ in range(12):
    fault = generator.choice(faults)[0]
    fault.left = generator.randint(1, 12)
    for call in (lambda: session.save(folder / "old"), lambda: llm.load_session(folder / "old"),
                 lambda: llm.generate("Once upon", params)):
        try:
            with fault.armed():
                call()
        except (TinyGPTError, OSError, MemoryError) as error:
            assert str(error), repr(error)
    loaded = llm.load_session(folder / "old")
    assert loaded.token_ids == session.token_ids
    assert llm.generate("Once upon", params)[0].outputs == expected
    assert [path.name for path in folder.iterdir()] == ["old"], list(folder.iterdir())
"""


def session(lab: Lab, generator: Random) -> str | None:
    run = lab.run_program(SESSION, str(lab.new_folder()), str(generator.randrange(10**9)))
    return None if run.code == 0 else f"exit code {run.code}: {run.err[-1500:]}"


def little_memory(lab: Lab, generator: Random) -> str | None:
    size = int(generator.uniform(0.3, 3.0) * 2**30)
    limit = (size, size)
    env = {"OPENBLAS_NUM_THREADS": 1}
    process = lab.start(*PROMPT, env=env, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit))
    return (problem := finish(process).problem(lab.text)) and f"{size >> 20} MiB: {problem}"


SCENARIOS = {injected(name, kind, *COMMANDS[name]): 4 for name in COMMANDS for kind in FAULTS} | {
    session: 2,
    little_memory: 2,
}
SLOW = {}
