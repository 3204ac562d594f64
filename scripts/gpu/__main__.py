"""The process of one job: `python -m gpu JOB DEADLINE`, started by bench_gpu.py. One JSON object a line on stdout.

JOB is a Job's JSON, DEADLINE the time.time() after which no case is begun. Every case is answered with "ms", "error"
or "left_out"; what the engines print goes to stderr.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from .cases import Case, Job, least_seconds
from .check import Evidence


class Side(Protocol):
    """Ours, or torch's: what a job is done with."""

    def measure(self, engine: str, case: Case) -> list[float]:
        """Milliseconds of a step, or of the prefill, of every repeat."""

    def evidence(self) -> Evidence: ...


def main(job_text: str, deadline_text: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    try:
        do(Job.from_json(json.loads(job_text)), float(deadline_text), answer)
    except Exception as error:  # nothing more of this job can be had; the parent goes on with the others
        answer(error=describe(error))


def do(job: Job, deadline: float, answer: Callable[..., None]) -> None:
    if job.side == "limits":
        from .ours import limits

        answer(limits=limits(job.device))
        return
    side = make_side(job)
    if job.check is not None:
        guarded(answer, "check", None, lambda: {"check": side.evidence().save(job.check)})
    for engine, case in job.runs:
        left, needed = deadline - time.time(), least_seconds(engine, job.config)
        if left < needed:
            answer(engine=engine, case=case.name, left_out=f"{left:.0f} s were left, and it takes about {needed:.0f}")
        else:
            guarded(answer, engine, case, partial(measured, side, engine, case))


def make_side(job: Job) -> Side:
    if job.side == "ours":
        from .ours import Ours

        return Ours(job)
    check_torch(job.device)
    from .torch_engines import Torch

    return Torch(job)


def measured(side: Side, engine: str, case: Case) -> dict[str, list[float]]:
    return {"ms": side.measure(engine, case)}


def check_torch(device: str) -> None:
    """RuntimeError, a sentence, where torch is missing or has no such device."""
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        raise RuntimeError(f"{error.name} is not installed: pip install torch transformers.") from error
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device: give --device cpu, or run this where there is one.")


def guarded(answer: Callable[..., None], engine: str, case: Case | None, run: Callable[[], dict[str, Any]]) -> None:
    """Answer with what `run` returns, or with its error."""
    about = {"engine": engine, "case": case and case.name}
    try:
        answer(**about, **run())
    except Exception as error:
        answer(**about, error=describe(error))


def describe(error: Exception) -> str:
    """On one line, and not a page of it; all of it goes to stderr."""
    traceback.print_exception(error)
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 400 else f"{text[:400]} ..."


if __name__ == "__main__":
    main(*sys.argv[1:])
