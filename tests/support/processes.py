"""The command line, in this process or another, and processes that a test has started (Linux)."""

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from support.paths import ROOT
from tinygpt.cli import main as cli

SECONDS = 120  # limit of a wait


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read_to(process: subprocess.Popen, stream: TextIO, text: str) -> str:
    """Return the lines up to the first with `text`; at the stream's end or after SECONDS, fail."""
    limit = threading.Timer(SECONDS, _kill, [process])
    limit.start()
    lines = ""
    try:
        for line in stream:
            lines += line
            if text in line:
                return lines
    finally:
        limit.cancel()
    raise AssertionError(f"no line had {text!r} until the end, or for {SECONDS} s: {lines!r}")


def heed_interrupts() -> None:
    """As on a terminal. What a shell runs in the background ignores them, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def readable(files: Iterable[Any], seconds: float = 0) -> list[int]:
    """Return the descriptors that have something to read within the time; select() knows none above 1023."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(1000 * seconds)]


def _kill(process: subprocess.Popen) -> None:
    """Kill the process and its descendants, which hold its streams."""
    started = below(process.pid) if Path("/proc").is_dir() else []
    process.kill()
    for pid in started:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def below(root: int) -> list[int]:
    """Return the pids of all descendants of `root`."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # it has ended
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found, pids = {root}, []
    while more := [pid for pid, parent in parents.items() if parent in found and pid not in found]:
        found.update(more)
        pids += more
    return pids


def ray_processes(root: int, name: str) -> list[int]:
    """Return the pids below `root` with a title of Ray that begins so: "MapWorker(" or "ServeReplica:"."""
    found = []
    for pid in below(root):
        with suppress(OSError):
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            found += [pid] * title.startswith(f"ray::{name}")
    return found


# What `generate` ends with on stderr: the number of tokens after the first, and the seed.
STATS = re.compile(
    r"tinygpt: prompt \d+ tokens?(?:, [\d.]+ tokens/s)?; generation (\d+) tokens?(?:, [\d.]+ tokens/s)?; "
    r"load [\d.]+ s(?:; compiling \d+ kernels? [\d.]+ s)?(?:; seed (\d+))?\n"
)


class Outcome:
    """How a command line ended that was run in this process."""

    def __init__(self, capsys, words: list[str]):
        capsys.readouterr()
        try:
            self.code = cli.main(words)
        except SystemExit as exit_:  # argparse
            self.code = exit_.code
        self.out, self.err = capsys.readouterr()


class Result(Outcome):
    """That of one command. `arguments` may be one string of words without spaces."""

    def __init__(self, capsys, command: str, arguments: str | list[str]):
        super().__init__(capsys, [command, *(arguments.split() if isinstance(arguments, str) else arguments)])


def run_process(*arguments, **options) -> subprocess.CompletedProcess:
    """`python -m tinygpt` as a user starts it."""
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run([sys.executable, "-m", "tinygpt", *arguments], **options)
