"""Servers that are started for a measurement and ended after it: ours, and those that users would take instead."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

PATIENCE = 300  # seconds to load
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Server:
    """command: {port} is filled in. more: fields of a request that keep it from ending early."""

    name: str
    model: str
    command: tuple[str, ...]
    more: dict[str, Any] = field(default_factory=dict)


def ours(model: str, dtype: str, threads: int | None) -> Server:
    command = [sys.executable, "-m", "tinygpt", "serve", "--port", "{port}", "--model", model, "--dtype", dtype]
    command += ["--served-model-name", "bench", *(["--threads", str(threads)] if threads else [])]
    return Server("tinygpt serve", "bench", tuple(command), {"ignore_eos": True, "return_token_ids": True})


def llama_cpp(python: str, gguf: Path, threads: int) -> Server:
    """llama-cpp-python's, from the environment of `python`: pip install "llama-cpp-python[server]"."""
    command = [python, "-m", "llama_cpp.server", "--model", str(gguf), "--model_alias", "bench", "--port", "{port}"]
    command += ["--n_threads", str(threads), "--n_threads_batch", str(threads), "--n_ctx", "512"]
    return Server("llama.cpp", "bench", tuple(command))


def transformers(executable: str, folder: Path) -> Server:
    """`transformers serve`, from its environment: pip install "transformers[serving]" torch."""
    command = (executable, "serve", str(folder), "--port", "{port}", "--device", "cpu", "--continuous-batching")
    return Server("transformers serve", str(folder), command)


@contextmanager
def running(server: Server, log: Path) -> Iterator[SplitResult]:
    """Its address, once it answers. RuntimeError, with the end of its log, if it does not."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [part.replace("{port}", str(port)) for part in server.command]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)
    try:
        _wait(process, f"http://127.0.0.1:{port}/v1/models", log)
        yield urlsplit(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen, address: str, log: Path) -> None:
    for _ in range(PATIENCE * 4):
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(address, timeout=10).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    raise RuntimeError(log.read_text(errors="replace").strip()[-300:] or "it did not answer")
