"""Processes that a test has started, and those that these have started."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

SECONDS = 120  # for which something that must happen is waited for


def until(condition: Callable[[], bool]) -> None:
    """Wait for it; AssertionError if it does not come."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def read_to(process: subprocess.Popen, stream: TextIO, text: str) -> str:
    """Its lines, up to the first with `text`; AssertionError if the process ends, or SECONDS pass, without that."""
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


def _kill(process: subprocess.Popen) -> None:
    """It and what it has started, which holds its streams."""
    started = below(process.pid) if Path("/proc").is_dir() else []
    process.kill()
    for pid in started:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Not if it has ended and only nobody has asked how. Linux."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def below(root: int) -> list[int]:
    """Pids of all that `root` has started, and of what these have. Linux."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended
                continue
    found, pids = {root}, []
    while more := [pid for pid, parent in parents.items() if parent in found and pid not in found]:
        found.update(more)
        pids += more
    return pids
