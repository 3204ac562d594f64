"""A model in a process of its own: `tinygpt serve`, started for a measurement and ended after it."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinygpt.errors import RequestError, how_to_install
from tinygpt.remote.remote_llm import KEY_VARIABLE, RemoteLLM

POLL_SECONDS = 0.05
LEAVE_SECONDS = 20.0  # to end, before it is ended
ADDRESS = re.compile(r"serving .* on (http://\S+)")


def check_server() -> None:
    """RequestError if what a server needs is not installed."""
    try:
        import tinygpt.server.app
        import tinygpt.server.transport.serve  # noqa: F401
    except ImportError as error:
        raise RequestError(f"--remote needs {error.name}, which comes with: {how_to_install('serve')}.") from None


@contextmanager
def served(model: str, dtype: str, max_connections: int, **flags: int | None) -> Iterator[RemoteLLM]:
    """An LLM behind a server on a free port. flags: those of `serve` that are not None.

    RequestError, in the server's own words, if it does not start.
    """
    command = [sys.executable, "-m", "tinygpt", "serve", "--port", "0", "--model", model, "--dtype", dtype]
    for name, value in flags.items():
        command += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr)
        try:
            with RemoteLLM(_address(process, log), max_connections=max_connections) as llm:
                yield llm
        finally:
            _end(process)


def _address(process: subprocess.Popen, log: Path) -> str:
    while True:
        has_ended = process.poll() is not None  # before its last words are read
        told = log.read_text(encoding="utf-8", errors="replace")
        found = ADDRESS.search(told)
        if found:
            return found[1]
        if has_ended:
            raise RequestError(f"the server did not start: {' '.join(told.splitlines()[-1:]) or 'it said nothing'}")
        time.sleep(POLL_SECONDS)


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
