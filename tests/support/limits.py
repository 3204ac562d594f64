"""Work in a process that is ended when it takes too long or too much memory: a limit, and no measurement."""

from collections.abc import Callable
from pathlib import Path

from support.apart import told
from tinygpt.errors import TinyGPTError
from tinygpt.tokenizer.tokenizer import Tokenizer
from tinygpt.weights.adapters.lora import merge_lora
from tinygpt.weights.adapters.soft_prompt import read_soft_prompt
from tinygpt.weights.open import open_checkpoint

NAMES = {name.__name__: name for name in (Tokenizer, merge_lora, read_soft_prompt, open_checkpoint)}
PATIENCE = 120  # seconds, for what waits without working, as the reader of a FIFO does


def outcome(expression: str, folder: Path, cpu_seconds: int = 10, megabytes: int = 1000) -> str:
    """What came of `expression`, in which `folder` is a path: the sentence of its TinyGPTError, or "loaded"."""
    return outcomes([(expression, folder)], cpu_seconds, megabytes)


def outcomes(pairs: list[tuple[str, Path]], cpu_seconds: int = 10, megabytes: int = 1000) -> str:
    """What came of all of these, a line each, one after the other in one process."""
    heard = told(_within_limits, pairs, cpu_seconds, megabytes, patience=PATIENCE)
    return "".join(f"{sentence}\n" for sentence in heard)


def _within_limits(
    tell: Callable[[str], None], pairs: list[tuple[str, Path]], cpu_seconds: int, megabytes: int
) -> None:
    _limit(cpu_seconds, megabytes)
    for expression, folder in pairs:
        try:
            eval(expression, dict(NAMES), {"folder": str(folder)})
        except TinyGPTError as error:
            tell(str(error))
        else:
            tell("loaded")


def _limit(cpu_seconds: int, megabytes: int) -> None:
    """From now on, so much more than has been used: importing is no part of the work."""
    import resource  # not on Windows

    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + cpu_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    space = pages * resource.getpagesize() + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
