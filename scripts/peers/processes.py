"""Virtual environments, the files made in them, and the processes that serve from them."""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .catalogue import Peer

SCRIPTS = Path(__file__).resolve().parents[1]
POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


class PeerError(Exception):
    """Why a peer is absent, in a sentence."""


def provide_python(peer: Peer, work: Path) -> Path:
    """The Python that has the peer's requirements, made once under `work`; for ours, this one.

    Raises PeerError if they cannot be installed.
    """
    if not peer.requirements:
        return Path(sys.executable)
    folder = work / "environments" / (peer.module + peer.build)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    wanted, installed = "\n".join(peer.requirements), folder / "installed.txt"
    if installed.exists() and installed.read_text() == wanted:
        return python
    venv.create(folder, clear=True, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *peer.requirements]
    run_logged(command, folder / "install.log", os.environ | peer.build_environment)
    installed.write_text(wanted)
    return python


def provide_folder(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder` as make(folder) fills it, once: a run that was broken off leaves nothing behind that looks done."""
    if not folder.exists():
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        make(partial)
        partial.rename(folder)
    return folder


def make_form(python: Path, module: str, checkpoint: Path | str, folder: Path, dtype: str) -> None:
    """Have `module` write its form of a checkpoint into `folder`, in the process of its own Python."""
    command = [str(python), "-m", "peers", "make", module, str(checkpoint), str(folder), dtype]
    run_logged(command, folder.with_name(folder.name + ".log"), environment(python))


def run_logged(command: list[str], log: Path, variables: dict[str, str]) -> None:
    with log.open("w") as output:
        status = subprocess.run(command, stdout=output, stderr=output, env=variables, cwd=SCRIPTS).returncode
    if status:
        raise PeerError(f"{' '.join(command[1:5])} ... failed with {status}: {last_line(log)} (all of it in {log})")


def environment(python: Path) -> dict[str, str]:
    """Ours finds tinygpt beside scripts/, whether or not it is installed. The others must not see that folder:
    transformers imports whatever is named `kernels`."""
    return os.environ | ({"PYTHONPATH": str(SCRIPTS.parent)} if python == Path(sys.executable) else {})


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


class Worker:
    """A process with one engine in it, asked over pipes."""

    def __init__(
        self,
        python: Path,
        peer: Peer,
        folder: Path,
        dtype: str,
        threads: int,
        log: Path,
        kv_cache_dtype: str | None = None,
    ):
        self._log = log
        cache = [kv_cache_dtype] if kv_cache_dtype and peer.has_caches else []
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", "peers", "serve", peer.module, str(folder), dtype, str(threads), *cache],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=SCRIPTS,
                env=environment(python) | peer.variables(dtype) | {name: str(threads) for name in POOLS},
            )

    def call(self, name: str, **arguments: Any) -> Any:
        """What the engine's method returns. PeerError if it failed or its process has ended."""
        try:
            self._process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"the process ended with {self._process.wait()}: {last_line(self._log)}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """Not by the end of its input: some engines hang or abort as they leave, and there is nothing to save."""
        self._process.kill()
        self._process.communicate()
