"""Jobs one after another, each in a process of its own, until they are done or the time is over."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .cases import Job, least_seconds
from .check import Agreement, Evidence
from .report import Results, Row

SCRIPTS = Path(__file__).resolve().parents[1]
START_SECONDS = 15  # to import everything and to load a model


def run_jobs(jobs: list[Job], deadline: float, log: Path, results: Results) -> Iterator[Row | None]:
    """Do the jobs in order. Yields whenever something is new in the results: the row, if it is one.

    deadline: the time.time() at which the last process is stopped. A job that would not fit is left out.
    log: gets what the processes say on stderr.
    """
    for job in jobs:
        left, needed = deadline - time.time(), _seconds_to_begin(job)
        if left < needed:
            reason = f"{left:.0f} s were left, and it takes about {needed:.0f} to begin"
            results.left_out |= dict.fromkeys(_names(job), reason)
            yield None
            continue
        for answer in _answers(job, deadline, log):
            yield take(answer, job, results)


def take(answer: dict[str, Any], job: Job, results: Results) -> Row | None:
    """Put an answer into the results. Returns the row that it brought."""
    name = _name(job, answer.get("engine", job.side), answer.get("case"))
    if "error" in answer:
        results.failed[name] = answer["error"]
        print(f"{name}: {answer['error']}", file=sys.stderr, flush=True)
    elif "left_out" in answer:
        results.left_out[name] = answer["left_out"]
    elif "limits" in answer:
        results.limits = answer["limits"]
    elif "check" in answer:
        _compare(Path(job.check).parent, results)
    else:
        case = next(case for _, case in job.runs if case.name == answer["case"])
        results.rows.append(Row(job.model, job.dtype, answer["engine"], case, tuple(answer["ms"])))
        return results.rows[-1]
    return None


def _compare(scratch: Path, results: Results) -> None:
    """Ours beside transformers, as soon as there are files of both."""
    theirs = scratch / "transformers.npz"
    compared = {agreement.dtype for agreement in results.agreements}
    for ours in sorted(scratch.glob("ours-*.npz")):
        dtype = ours.stem.removeprefix("ours-")
        if theirs.exists() and dtype not in compared:
            results.agreements.append(Agreement.of(dtype, Evidence.load(ours), Evidence.load(theirs)))


def _answers(job: Job, deadline: float, log: Path) -> Iterator[dict[str, Any]]:
    """What the job's process says, and at its end an error for everything that it said nothing about."""
    unanswered = dict.fromkeys((engine, case.name) for engine, case in job.runs)
    unanswered |= {} if job.check is None else {("check", None): None}
    unanswered |= {} if job.runs else {(job.side, None): None}
    process = _start(job, deadline, log)
    reason = ""
    try:
        for answer in _lines(process, _patience(job), deadline):
            if isinstance(answer, str):
                reason = answer
            elif "engine" in answer or "limits" in answer:
                unanswered.pop((answer.get("engine", job.side), answer.get("case")), None)
                yield answer
            else:
                reason = answer["error"]
        status = process.poll() if reason else process.wait()
    finally:
        process.kill()
        process.wait()
    reason = reason or f"its process ended with {status}: {_last_line(log)}"
    for engine, case in unanswered:
        yield {"engine": engine, "case": case, "error": reason}


def _lines(process: subprocess.Popen, patience: float, deadline: float) -> Iterator[dict[str, Any] | str]:
    """The objects that a process prints, until it ends or has to be stopped: then, last, why."""
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    while True:
        try:
            text = lines.get(timeout=max(0.1, min(patience, deadline - time.time())))
        except queue.Empty:
            yield "it was stopped at the time bound" if time.time() >= deadline else "it hung, and was stopped"
            return
        if text is None:
            return
        yield json.loads(text)


def _start(job: Job, deadline: float, log: Path) -> subprocess.Popen:
    variables = {"PYTHONPATH": os.pathsep.join([str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "gpu", json.dumps(job.as_json()), str(deadline)]
    with log.open("a") as errors:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=SCRIPTS, env=os.environ | variables
        )


def _read(process: subprocess.Popen, lines: "queue.Queue[str | None]") -> None:
    for text in process.stdout:
        lines.put(text)
    lines.put(None)


def _last_line(log: Path) -> str:
    said = [text.strip() for text in log.read_text(errors="replace").splitlines() if text.strip()]
    return said[-1] if said else "it said nothing"


def _patience(job: Job) -> float:
    """Seconds that its process may say nothing: a GPU can hang."""
    slowest = max((least_seconds(engine, job.config) for engine, _ in job.runs), default=0)
    return START_SECONDS + 120 + 3 * slowest


def _seconds_to_begin(job: Job) -> float:
    return START_SECONDS + (least_seconds(job.runs[0][0], job.config) if job.runs else 0)


def _names(job: Job) -> list[str]:
    return [_name(job, engine, case.name) for engine, case in job.runs] or ["the GPU's limits"]


def _name(job: Job, engine: str, case: str | None) -> str:
    if job.side == "limits":
        return "the GPU's limits"
    return ", ".join(filter(None, (job.model, job.dtype, engine, case)))
