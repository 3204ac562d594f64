"""Many prompts from a file: check all of them, skip those already answered, write each as it finishes."""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinygpt.cli import loading
from tinygpt.cli.batch.output_file import Earlier, RecordFile, check_dtype, check_output, read_earlier
from tinygpt.cli.batch.tasks import Answer, Task, has_workers
from tinygpt.cli.input.prompts_file import PromptRecord, PromptsFile, in_json_words, read_lines
from tinygpt.cli.output.cut_texts import num_cut
from tinygpt.cli.output.messages import Pace, counted, put, say
from tinygpt.cli.output.statistics import rates
from tinygpt.cli.termination import sigterm_raises
from tinygpt.errors import RequestError, TinyGPTError
from tinygpt.guided_grammar import text_check
from tinygpt.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tinygpt.cli.batch.workers import Reader
    from tinygpt.engine.throughput import Throughput
    from tinygpt.llm import LLM
    from tinygpt.request.prompts import Prompt

GRAMMARS = 32  # to keep, of those that texts which were cut short are held against


def run_batch(args: argparse.Namespace, params: SamplingParams) -> None:
    """Answer the prompts of --input; `params` where a line has no field of its own.

    Raises RequestError, before any work, that lists every line which is impossible; and at last TinyGPTError if a
    prompt has failed, now or earlier.
    """
    with sigterm_raises():
        _run_batch(args, params)


def _run_batch(args: argparse.Namespace, params: SamplingParams) -> None:
    source, target = Path(args.input), None if args.output is None else Path(args.output)
    if target is not None:
        check_output(target, source)
    file = read_lines(source, params)
    if file.problems:
        file.refuse(_problems_for_the_model(args, file))
    prompts = file.records
    if not prompts:
        say(f"--input {source} holds no prompt, so there is nothing to do")
    earlier = Earlier() if target is None else read_earlier(target, prompts, args.model, args.dtype)
    pending = [prompt for prompt in prompts if prompt.id not in earlier.ids]
    if len(pending) < len(prompts):
        skipped = f"{len(prompts) - len(pending)} of {counted(len(prompts), 'prompt')} skipped"
        say(f"{skipped}: {target} has their records; to make them with other flags, name another file")
    if earlier.num_lost_bytes:
        half = f"half a record of {counted(earlier.num_lost_bytes, 'byte')}"
        say(f"{target} ends in {half}, as a run leaves it that is killed: its prompt is answered anew")
    num_failed, answer = earlier.num_failed, _answer_by_workers if has_workers(args) else _answer
    with _writer(target, earlier) as write:
        if pending:
            num_failed += answer(_Job(args, file, target, earlier, pending, write))
    if num_failed:
        raise TinyGPTError(_how_failed(args.output, num_failed, len(prompts)))


@dataclass(frozen=True)
class _Job:
    """What is left to do of a file: its `pending` prompts, each to be written behind the `earlier` records."""

    args: argparse.Namespace
    file: PromptsFile
    target: Path | None
    earlier: Earlier
    pending: list[PromptRecord]
    write: Callable[[str], None]

    def tasks(self, llm: "LLM | Reader") -> list[Task]:
        """A task for each, its prompt encoded once. RequestError, for all lines at once, for what only the model can
        refuse."""
        check_dtype(self.target, self.earlier, llm.dtype)
        encoded, problems = _encoded(llm, self.pending)
        self.file.refuse(problems)
        return [Task(i, self.pending[i].id, prompt, self.pending[i].params) for i, prompt in enumerate(encoded)]


def _answer(job: _Job) -> int:
    """Write what has become of each prompt; how many have failed."""
    tasks: list[Task] = []
    llm, load_seconds = loading.load_llm(job.args, lambda llm: tasks.extend(job.tasks(llm)))
    before = llm.engine.throughput
    prompts, params = [task.prompt for task in tasks], [task.params for task in tasks]
    outputs = llm.generate_as_finished(prompts, params, return_exceptions=True)
    answers = (Answer.of(tasks[i], job.args.model, llm.dtype, found) for i, found in outputs)
    num_failed = _write_all(job, answers)
    done = f"{counted(len(tasks), 'prompt')}: {rates(llm.engine.throughput - before)}"
    say(f"{done}; load {load_seconds:.2f} s; seeds in their records")
    return num_failed


def _answer_by_workers(job: _Job) -> int:
    """As `_answer`, by others than this process."""
    from tinygpt.cli.batch.workers import Reader, answers_of, started  # multiprocessing, which no other command needs

    args = job.args
    reader = Reader(args)  # which sizes the thread pools, before NumPy is imported
    from tinygpt.engine.throughput import side_by_side

    tasks = job.tasks(reader)
    count, works = min(args.workers, len(tasks)), {}
    began = time.perf_counter()
    if args.ray:
        from tinygpt.cli.batch.ray_actors import answers_on_ray

        # Entered before the bar is made: stderr is another stream within.
        with answers_on_ray(count, reader.setup_elsewhere(args.workers), tasks) as answers:
            num_failed = _write_all(job, _noted(answers, works))
    else:
        with reader.setup(count) as setup, started(count, setup) as workers:
            num_failed = _write_all(job, _noted(answers_of(workers, tasks, setup.room), works))
    done = f"{counted(len(tasks), 'prompt')} by {counted(count, 'worker')} in {time.perf_counter() - began:.2f} s"
    say(f"{done}: {rates(side_by_side(works.values()))}; seeds in their records")
    return num_failed


def _noted(answers: Iterator[Answer], works: "dict[str, Throughput]") -> Iterator[Answer]:
    """The answers; `works` has what each worker had done by its last."""
    for answer in answers:
        works[answer.worker] = answer.work
        yield answer


def _encoded(llm: "LLM | Reader", records: list[PromptRecord]) -> tuple[list["Prompt"], dict[int, str]]:
    """The prompts that the model can serve, and what is wrong with each other line."""
    encoded, problems = [], {}
    for record in records:
        try:
            prompt = {"prompt": record.prompt, "cache_salt": record.cache_salt}
            encoded.append(llm.read_prompt(prompt, record.split_special_tokens))
            llm.generate_as_finished([encoded[-1]], record.params)  # checks when called, runs when iterated
        except RequestError as error:
            problems[record.line] = in_json_words(error)
    return encoded, problems


def _problems_for_the_model(args: argparse.Namespace, file: PromptsFile) -> dict[int, str]:
    """Of lines that could be read, in a file that is refused for others: all of them are told at once."""
    from tinygpt.cli.batch.workers import Reader
    from tinygpt.weights.open import is_here

    if not file.records or not is_here(args.model):  # nothing is downloaded for a file that is refused anyway
        return {}
    with suppress(TinyGPTError, OSError):  # what is wrong with the model is told once the file is right
        return _encoded(Reader(args), file.records)[1]
    return {}


def _write_all(job: _Job, answers: Iterator[Answer]) -> int:
    """Write each record as it comes, and say how far that is: by a bar on a terminal, and elsewhere by a line now and
    then. At last, say which texts were cut. How many are errors."""
    from tqdm import tqdm

    total = len(job.file.records)
    num_truncated, num_unfinished, num_failed, num_answered = 0, 0, 0, total - len(job.pending)
    check = functools.lru_cache(GRAMMARS)(text_check)
    pace = Pace()
    # disable=None: no bar where stderr is no terminal.
    with tqdm(total=total, initial=num_answered, unit=" prompts", disable=None) as bar:
        try:
            for answer in in_order(answers) if job.args.keep_order else answers:
                job.write(answer.line)
                num_answered += 1
                num_truncated += answer.is_truncated
                num_failed += answer.is_failed
                num_unfinished += num_cut(job.pending[answer.index].params, answer.samples, check)
                bar.update()
                if pace.is_due() and num_answered < total:
                    say(f"{num_answered} of {counted(total, 'prompt')} answered")
        except KeyboardInterrupt as stop:
            raise type(stop)(_how_to_go_on(job.args.output, num_answered, total)) from None
    if num_truncated:
        say(f"{counted(num_truncated, 'prompt')} not read from the beginning: num_truncated_tokens in their records")
    if num_unfinished:
        say(
            f"{counted(num_unfinished, 'guided text')} cut short, and not yet what the grammar asks for: "
            '"finish_reason": "length" in their records'
        )
    return num_failed


def in_order(answers: Iterator[Answer]) -> Iterator[Answer]:
    """By their indices, which count from 0; those that come early wait."""
    early: dict[int, Answer] = {}
    num_given = 0
    for answer in answers:
        early[answer.index] = answer
        while num_given in early:
            yield early.pop(num_given)
            num_given += 1


def _how_to_go_on(output: str | None, num_answered: int, total: int) -> str:
    answered = f"{num_answered} of {counted(total, 'prompt')}"
    if output is None:
        return f"{answered} answered, on stdout; a run with --output FILE can be continued"
    return f"{answered} answered, in {output}; give the same command again to go on behind them"


def _how_failed(output: str | None, num_failed: int, total: int) -> str:
    failed = f'{num_failed} of {counted(total, "prompt")} failed: "error" in their records says why'
    return f"{failed}." if output is None else f"{failed}; to have them tried again, remove these lines from {output}."


@contextmanager
def _writer(target: Path | None, earlier: Earlier) -> Iterator[Callable[[str], None]]:
    """What writes a line at once: to the file, behind its earlier records, or to stdout."""
    if target is None:
        yield functools.partial(put, file=sys.stdout)
        return
    with RecordFile(target, earlier) as file:
        yield file.write
