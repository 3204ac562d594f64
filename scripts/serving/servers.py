"""Servers that are started for a measurement and ended after it: ours, and those that users would take instead."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

PATIENCE = 300  # seconds to load
ROOT = Path(__file__).resolve().parents[2]
OURS = "tinygpt serve"
WITH_USAGE = {"stream_options": {"include_usage": True}}


@dataclass(frozen=True, eq=False)
class Server:
    """command: {port} is filled in. more: fields of a request that keep it from ending early."""

    name: str
    model: str
    command: tuple[str, ...]
    more: dict[str, Any] = field(default_factory=dict)


def ours(model: str, dtype: str, threads: int | None, max_num_seqs: int | None = None) -> Server:
    command = [sys.executable, "-m", "tinygpt", "serve", "--port", "{port}", "--model", model, "--dtype", dtype]
    command += ["--served-model-name", "bench", *(["--threads", str(threads)] if threads else [])]
    command += ["--max-num-seqs", str(max_num_seqs)] if max_num_seqs else []
    return Server(OURS, "bench", tuple(command), {"ignore_eos": True, **WITH_USAGE})


def llama_server(executable: str, gguf: Path, threads: int, clients: int, length: int) -> Server:
    """llama.cpp's own, with a slot of `length` tokens for each client."""
    command = [executable, "--model", str(gguf), "--alias", "bench", "--port", "{port}"]
    command += ["--threads", str(threads), "--threads-batch", str(threads)]
    command += ["--parallel", str(clients), "--ctx-size", str(clients * length)]
    return Server("llama-server", "bench", tuple(command), {"ignore_eos": True, **WITH_USAGE})


def llama_cpp(python: str, gguf: Path, threads: int, length: int, eos_token_ids: Iterable[int]) -> Server:
    """llama-cpp-python's, from the environment of `python`: pip install "llama-cpp-python[server]".

    It answers one request at a time; unless it is told not to, it breaks that off when the next one comes.
    """
    command = [python, "-m", "llama_cpp.server", "--model", str(gguf), "--model_alias", "bench", "--port", "{port}"]
    command += ["--n_threads", str(threads), "--n_threads_batch", str(threads), "--n_ctx", str(length)]
    command += ["--interrupt_requests", "false"]
    more = {"logit_bias": {str(token_id): -100 for token_id in eos_token_ids}}
    return Server("llama-cpp-python", "bench", tuple(command), more)


def transformers(executable: str, folder: Path) -> Server:
    """`transformers serve`, from its environment: pip install "transformers[serving]" torch."""
    command = (executable, "serve", str(folder), "--port", "{port}", "--device", "cpu", "--continuous-batching")
    more = {"generation_config": json.dumps({"eos_token_id": None, "do_sample": False})}
    return Server("transformers serve", str(folder), command, more)


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
