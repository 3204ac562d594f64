"""Processes that are killed or interrupted at random moments, and continued."""

import shutil
import signal
import subprocess
import time
from random import Random

from .lab import PROMPT, Lab, Run, finish

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def strike(process: subprocess.Popen, generator: Random, within: float) -> tuple[Run, signal.Signals]:
    """Send a signal at a random moment of its run."""
    number = generator.choice(SIGNALS)
    time.sleep(generator.random() * within)
    if process.poll() is None:
        process.send_signal(number)
    return finish(process), number


def problem_of_end(run: Run, number: signal.Signals) -> str | None:
    """Whether a process ended as one that got this signal, or before it came."""
    if run.code == -1000:
        return run.err
    if number == signal.SIGINT and run.code not in (0, 130, -number):
        return f"exit code {run.code} after SIGINT: {run.err[-1500:]}"
    if run.code not in (0, 130, -number):
        return f"exit code {run.code} after {number.name}: {run.err[-1500:]}"
    is_ours = "Traceback" in run.err and "tinygpt/cli" in run.err  # and not of Python's own start
    return f"a traceback after {number.name}: {run.err[-1500:]}" if is_ours else None


def batch_is_continued(lab: Lab, generator: Random) -> str | None:
    output, seconds = lab.new_folder() / "out.jsonl", 4.0
    for _ in range(generator.randint(1, 4)):
        run, number = strike(lab.start(*lab.batch(output)), generator, seconds)
        if problem := problem_of_end(run, number):
            return problem
    last = lab.run(*lab.batch(output))
    return last.problem("", may_fail=False) or lab.problem_of_records(output)


def generate_gives_a_beginning(lab: Lab, generator: Random) -> str | None:
    expected = lab.text
    run, number = strike(lab.start(*PROMPT), generator, 3.0)
    if problem := problem_of_end(run, number):
        return problem
    return None if expected.startswith(run.out.rstrip("\n")) else f"another text: {run.out!r}"


def convert_is_whole_or_not_there(lab: Lab, generator: Random) -> str | None:
    target = lab.new_folder() / "int8"
    run, number = strike(lab.start("convert", "demo", str(target)), generator, 4.0)
    if problem := problem_of_end(run, number):
        return problem
    if not target.exists():
        again = lab.run("convert", "demo", str(target))
        if problem := again.problem("", may_fail=False):
            return f"convert, again: {problem}"
    expected = lab.converted_text
    problem = lab.run(*PROMPT, "--model", str(target)).problem(expected, may_fail=False)
    shutil.rmtree(target)
    return problem


def compiling_is_taken_up_again(lab: Lab, generator: Random) -> str | None:
    expected, env = lab.text, {"XDG_CACHE_HOME": lab.new_folder(), "NUMBA_CACHE_DIR": None}
    for _ in range(2):
        run, number = strike(lab.start(*PROMPT, env=env), generator, 25.0)
        if problem := problem_of_end(run, number):
            return problem
    return lab.run(*PROMPT, env=env).problem(expected, may_fail=False)


def two_processes_compile_at_once(lab: Lab, generator: Random) -> str | None:
    expected, env = lab.text, {"XDG_CACHE_HOME": lab.new_folder(), "NUMBA_CACHE_DIR": None}
    first = lab.start(*PROMPT, env=env)
    time.sleep(generator.random())
    second = lab.start(*PROMPT, env=env)
    problems = [finish(process).problem(expected, may_fail=False) for process in (first, second)]
    return problems[0] or problems[1] or lab.run(*PROMPT, env=env).problem(expected, may_fail=False)


SCENARIOS = {batch_is_continued: 6, generate_gives_a_beginning: 6, convert_is_whole_or_not_there: 3}
SLOW = {compiling_is_taken_up_again: 1, two_processes_compile_at_once: 1}
