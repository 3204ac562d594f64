"""Work in a forked process that has the libraries already, under limits of time and memory where a test asks.

A new interpreter imports Numba and NumPy for half a second. Tests of a process's beginning or end start a real one.
"""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tinygpt.errors import TinyGPTError
from tinygpt.text.tokenizer import Tokenizer
from tinygpt.weights.adapters.lora import merge_lora
from tinygpt.weights.adapters.peft import read_soft_prompt
from tinygpt.weights.open import open_checkpoint

IMPORTED = ("tinygpt.llm", "tinygpt.kernels.cpu", "tinygpt.weights.open", "tinygpt.weights.adapters.lora")
NAMES = {name.__name__: name for name in (Tokenizer, merge_lora, read_soft_prompt, open_checkpoint)}
PATIENCE = 120  # seconds, for a reader that waits without working, such as that of a FIFO


def told(work: Callable[..., None], *arguments: Any, patience: float) -> list[Any]:
    """Return all that work(tell, *arguments) tells; the process is silent for at most `patience` seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, work, arguments), daemon=True)
    process.start()
    theirs.close()
    heard = []
    try:
        while ours.poll(patience):
            heard.append(ours.recv())
    except EOFError:
        pass
    else:
        process.kill()
    process.join()
    assert process.exitcode == 0, f"ended by {process.exitcode} after {heard}"
    return heard


def _work(pipe: Connection, work: Callable[..., None], arguments: tuple) -> None:
    work(pipe.send, *arguments)
    os._exit(0)  # waits for no thread


def outcome(expression: str, folder: Path, cpu_seconds: int = 10, megabytes: int = 1000) -> str:
    """Return the sentence of the TinyGPTError that `expression` of `folder` raises, or "loaded"."""
    return outcomes([(expression, folder)], cpu_seconds, megabytes)


def outcomes(pairs: list[tuple[str, Path]], cpu_seconds: int = 10, megabytes: int = 1000) -> str:
    """Return a line for each (expression, folder), all in one process."""
    heard = told(_within_limits, pairs, cpu_seconds, megabytes, patience=PATIENCE)
    return "".join(f"{sentence}\n" for sentence in heard)


def _within_limits(tell: Callable[[str], None], pairs: list, cpu_seconds: int, megabytes: int) -> None:
    """Limit the process to this much more than it has used: imports are no part of the work."""
    import resource  # absent on Windows

    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + cpu_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    space = pages * resource.getpagesize() + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    for expression, folder in pairs:
        try:
            eval(expression, dict(NAMES), {"folder": str(folder)})
        except TinyGPTError as error:
            tell(str(error))
        else:
            tell("loaded")
