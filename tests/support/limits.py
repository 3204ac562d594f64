"""A program in a process that is ended when it takes too long or too much memory: a limit, and no measurement."""

import os
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT

# Everything is imported before the limits begin, so that they are those of the work alone.
PROGRAM = """
import resource, sys
from tinygpt.errors import TinyGPTError
from tinygpt.tokenizer.tokenizer import Tokenizer
from tinygpt.weights.adapters.lora import merge_lora
from tinygpt.weights.adapters.soft_prompt import read_soft_prompt
from tinygpt.weights.open import open_checkpoint

used = resource.getrusage(resource.RUSAGE_SELF)
seconds = int(used.ru_utime + used.ru_stime) + 1 + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
pages = int(open("/proc/self/statm").read().split()[0])
space = pages * resource.getpagesize() + int(sys.argv[2]) * 2**20
resource.setrlimit(resource.RLIMIT_AS, (space, space))
for expression, folder in zip(sys.argv[3::2], sys.argv[4::2]):
    try:
        eval(expression)
    except TinyGPTError as error:
        print(error)
    else:
        print("loaded")
"""


def outcome(expression: str, folder: Path, cpu_seconds: int = 10, megabytes: int = 1000) -> str:
    """What came of `expression`, in which `folder` is a path: the sentence of its TinyGPTError, or "loaded"."""
    return outcomes([(expression, folder)], cpu_seconds, megabytes)


def outcomes(pairs: list[tuple[str, Path]], cpu_seconds: int = 10, megabytes: int = 1000) -> str:
    """What came of all of these, one after the other in one process."""
    arguments = [str(cpu_seconds), str(megabytes), *(str(part) for pair in pairs for part in pair)]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,  # for what waits without working, as the reader of a FIFO does
    )
    assert result.returncode == 0, f"ended by {result.returncode}: {result.stderr[-500:]}"
    return result.stdout
