"""`generate --input`: check all prompts of a file, skip answered prompts, write each record as it finishes.

Records go to stdout or are appended to the file of --output. The same command continues an interrupted run.
"""

import argparse
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygpt.cli.input import PromptRecord, is_unicode, read_prompts, refuse_lines
from tinygpt.cli.loading import load_llm, sigterm_raises, warm_up
from tinygpt.cli.output import check_writable, counted, emit, log, progress, rates
from tinygpt.errors import FailedRequestError, RequestError, TinyGPTError
from tinygpt.weights.files import sync, sync_folder

if TYPE_CHECKING:
    from tinygpt.engine.prompts import Prompt
    from tinygpt.outputs import RequestOutput
    from tinygpt.sampling_params import SamplingParams

BEGINNING = b'{"id": '  # of every record: tells a half-written record from other text
SYNC_SECONDS = 1.0  # between two fsyncs: a power cut may cost the records of a second


@dataclass(frozen=True)
class Task:
    """A prompt to answer; `index` is its place among the pending ones."""

    index: int
    record_id: str | int
    prompt: "Prompt"
    params: "SamplingParams"

    def answer(self, model: str, dtype: str, found: "RequestOutput | FailedRequestError") -> "Answer":
        if isinstance(found, FailedRequestError):
            given = {"prompt": self.prompt.text, "prompt_token_ids": self.prompt.token_ids, "error": str(found)}
            return Answer(self.index, _json_line({"id": self.record_id, "model": model, "dtype": dtype, **given}), True)
        line = record_line(self.record_id, model, dtype, found)
        return Answer(self.index, line, False, found.num_truncated_tokens > 0, num_cut(self.params, found))


@dataclass(frozen=True)
class Answer:
    """The record of a task."""

    index: int
    line: str
    is_failed: bool = False  # the record has an error in place of samples
    is_truncated: bool = False
    num_cut: int = 0  # guided samples that a limit ended


def record_line(record_id: str | int | None, model: str, dtype: str, output: "RequestOutput") -> str:
    """Return one line of JSON: id, model as it was given, dtype of its weights, and RequestOutput's fields.

    Times are in seconds since the prompt's arrival.
    """
    first = output.metrics.time_to_first_token
    times = {
        "time_to_first_token": None if first is None else round(first, 6),
        "time_to_finish": round(output.metrics.time_to_finish, 6),
    }
    return _json_line({"id": record_id, "model": model, "dtype": dtype, **asdict(output), "metrics": times})


def _json_line(record: dict[str, Any]) -> str:
    line = json.dumps(record, ensure_ascii=False)
    return line if is_unicode(line) else json.dumps(record)


def num_cut(params: "SamplingParams", output: "RequestOutput") -> int:
    """Return the number of guided samples that a limit ended."""
    return 0 if params.guidance is None else sum(sample.finish_reason == "length" for sample in output.outputs)


def run_batch(args: argparse.Namespace, params: "SamplingParams") -> None:
    """Answer the prompts of --input; `params` are the defaults of a line's fields.

    Raise RequestError, before any work, that lists all impossible lines; TinyGPTError at the end if a prompt failed.
    """
    with sigterm_raises():
        source, target = Path(args.input), None if args.output is None else Path(args.output)
        if target is not None:
            check_writable("--output", target)
            if target.exists() and source.exists() and target.samefile(source):
                raise RequestError(f"--output {target} is the file of --input: name another one.")
        prompts = read_prompts(source, params)
        if not prompts:
            log(f"--input {source} holds no prompt, so there is nothing to do")
        earlier = Earlier() if target is None else read_earlier(target, prompts, args.model, args.dtype)
        pending = [prompt for prompt in prompts if prompt.id not in earlier.ids]
        if len(pending) < len(prompts):
            skipped = f"{len(prompts) - len(pending)} of {counted(len(prompts), 'prompt')} skipped"
            log(f"{skipped}: {target} has their records; to make them with other flags, name another file")
        if earlier.num_lost_bytes:
            half = f"half a record of {counted(earlier.num_lost_bytes, 'byte')}"
            log(f"{target} ends in {half}, as a killed run leaves it: its prompt is answered again")
        num_failed = earlier.num_failed
        with RecordFile(target, earlier) as file:
            if pending:
                answer = _answer_on_ray if args.ray else _answer
                num_failed += answer(args, pending, earlier, partial(_write_all, args, file, len(prompts)))
        if num_failed:
            failed = f'{num_failed} of {counted(len(prompts), "prompt")} failed: "error" in their records says why'
            again = "" if target is None else f"; to have them tried again, remove these lines from {target}"
            raise TinyGPTError(f"{failed}{again}.")


def _answer(
    args: argparse.Namespace, pending: list[PromptRecord], earlier: "Earlier", write_all: Callable[..., int]
) -> int:
    """Write the record of each pending prompt. Return the number of failed prompts."""
    llm, load_seconds = load_llm(args)
    check_dtype(args.output, earlier, llm.dtype)
    # generate_as_finished checks when it is called, and runs when it is iterated.
    tasks = read_tasks(args.input, pending, llm.read_prompt, llm.generate_as_finished)
    warm_up(llm, args)
    before = llm.engine.throughput
    prompts, params = [task.prompt for task in tasks], [task.params for task in tasks]
    outputs = llm.generate_as_finished(prompts, params, return_exceptions=True)
    num_failed = write_all((tasks[i].answer(args.model, llm.dtype, found) for i, found in outputs), len(tasks))
    done = f"{counted(len(tasks), 'prompt')}: {rates(llm.engine.throughput - before)}"
    log(f"{done}; load {load_seconds:.2f} s; seeds in their records")
    return num_failed


def _answer_on_ray(
    args: argparse.Namespace, pending: list[PromptRecord], earlier: "Earlier", write_all: Callable[..., int]
) -> int:
    """As `_answer`, by actors of a Ray cluster."""
    from tinygpt.on_ray.batch import Setup, outputs_on_ray

    started = time.perf_counter()
    setup, inputs = Setup.of(args)
    check_dtype(args.output, earlier, setup.dtype)
    tasks = read_tasks(args.input, pending, inputs.read_prompt, inputs.request)
    count = min(args.ray, len(tasks))
    with outputs_on_ray(count, setup, [(task.index, task.prompt, task.params) for task in tasks]) as outputs:
        answers = (tasks[i].answer(args.model, setup.dtype, found) for i, found in outputs)
        num_failed = write_all(answers, len(tasks))
    seconds = time.perf_counter() - started
    log(f"{counted(len(tasks), 'prompt')} by {counted(count, 'actor')} in {seconds:.2f} s; seeds in their records")
    return num_failed


def read_tasks(source: str, records: list[PromptRecord], read: Callable, check: Callable) -> list[Task]:
    """Encode each prompt by `read` and check it by `check`. Raise RequestError that lists all impossible lines."""
    tasks, problems = [], {}
    for record in records:
        try:
            prompt = read(record.prompt, record.split_special_tokens)
            check(prompt, record.params)
            tasks.append(Task(len(tasks), record.id, prompt, record.params))
        except RequestError as error:
            problems[record.line] = str(error)
    refuse_lines(Path(source), problems)
    return tasks


def _write_all(
    args: argparse.Namespace, file: "RecordFile", total: int, answers: Iterable[Answer], num_pending: int
) -> int:
    num_truncated, num_unfinished, num_failed, num_answered = 0, 0, 0, total - num_pending
    answers = in_order(answers) if args.keep_order else answers
    try:
        for answer in progress("prompt", "answered")(answers, total, num_answered):
            file.write(answer.line)
            num_answered += 1
            num_truncated += answer.is_truncated
            num_failed += answer.is_failed
            num_unfinished += answer.num_cut
    except KeyboardInterrupt as stop:
        how = f"in {args.output}; give the same command again to continue"
        if args.output is None:
            how = "on stdout; a run with --output FILE can be continued"
        raise type(stop)(f"{num_answered} of {counted(total, 'prompt')} answered, {how}") from None
    if num_truncated:
        log(f"{counted(num_truncated, 'prompt')} truncated: see num_truncated_tokens in their records")
    if num_unfinished:
        log(
            f'{counted(num_unfinished, "guided text")} cut short by a limit: "finish_reason": "length" in their records'
        )
    return num_failed


def in_order(answers: Iterator[Answer]) -> Iterator[Answer]:
    """Yield the answers by their indices, which count from 0."""
    early: dict[int, Answer] = {}
    num_given = 0
    for answer in answers:
        early[answer.index] = answer
        while num_given in early:
            yield early.pop(num_given)
            num_given += 1


@dataclass(frozen=True)
class Earlier:
    """The records that an earlier run left in the output file."""

    ids: frozenset[str | int] = frozenset()
    num_failed: int = 0  # records with an error
    dtype: str | None = None  # None: there are no records
    size: int = 0  # bytes of the complete records
    end: int = 0  # bytes of the file, a half-written last record included
    lacks_newline: bool = False  # the last record is complete, but for the end of its line

    @property
    def num_lost_bytes(self) -> int:
        return self.end - self.size


def read_earlier(path: Path, prompts: Iterable[PromptRecord], model: str, dtype: str) -> Earlier:
    """Find the prompts that the file already answers. A half-written last record, as of a killed run, does not count.

    Raise RequestError if the file has other lines, or records of another model or dtype.
    """
    if not path.is_file():  # not there yet, or a device such as /dev/null
        return Earlier()
    prompt_of = {record.id: record.prompt for record in prompts}
    ids, num_failed, size, end, lacks_newline = set(), 0, 0, 0, False
    try:
        with path.open("rb") as file:
            lines = file.readlines()
    except OSError as error:
        raise RequestError(f"--output {path} cannot be read: {error.strerror}.") from None
    for number, line in enumerate(lines, 1):
        place = f"line {number} of --output {path}"
        end += len(line)
        lacks_newline = not line.endswith(b"\n")
        record = _record_in(line)
        if record is None:
            if not lacks_newline or not line.startswith(BEGINNING[: len(line)]):
                raise RequestError(f"{place} is not a record of an earlier run: name another file.")
            break
        _check_record(place, record, prompt_of, model, dtype)
        if record["id"] in ids:
            raise RequestError(f"{place} answers id {record['id']!r} a second time: remove one of the two lines.")
        dtype = record["dtype"]  # if "auto" was given, the first record decides for the others
        ids.add(record["id"])
        num_failed += "error" in record
        size += len(line)
    return Earlier(frozenset(ids), num_failed, dtype if ids else None, size, end, lacks_newline and size == end)


def _record_in(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        is_id = isinstance(record["id"], (str, int)) and not isinstance(record["id"], bool)
        is_made_by = isinstance(record["model"], str) and isinstance(record["dtype"], str)
        if is_id and is_made_by and {"prompt", "prompt_token_ids"} <= record.keys():
            return record
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def _check_record(
    place: str, record: dict[str, Any], prompt_of: dict[str | int, str | list[int]], model: str, dtype: str
) -> None:
    if record["id"] not in prompt_of:
        raise RequestError(f"{place} answers id {record['id']!r}, which --input does not have: name another file.")
    if prompt_of[record["id"]] not in (record["prompt"], record["prompt_token_ids"], []):  # [] became the BOS token
        raise RequestError(f"{place} answers another prompt than the one with id {record['id']!r}: name another file.")
    is_same = os.path.isdir(record["model"]) and os.path.isdir(model) and os.path.samefile(record["model"], model)
    if record["model"] != model and not is_same:
        raise RequestError(f"{place} was made by model {record['model']} and --model is {model}: name another file.")
    if dtype not in ("auto", record["dtype"]):
        raise RequestError(f"{place} was made with dtype {record['dtype']} and not {dtype}: name another file.")


def check_dtype(output: str | None, earlier: Earlier, dtype: str) -> None:
    """Raise RequestError if the loaded model has another dtype than the records of the file."""
    if earlier.dtype not in (None, dtype):
        raise RequestError(
            f"the records of --output {output} were made with dtype {earlier.dtype} and this run has {dtype}: give "
            f"--dtype {earlier.dtype}, or name another file."
        )


class RecordFile:
    """stdout, or the output file, locked against other runs and synced each second and at the end."""

    def __init__(self, path: Path | None, earlier: Earlier):
        self._path, self._stdout = path, sys.stdout  # of now: Ray's own prints go to another one
        self._file, self._is_regular, self._synced = None, False, time.monotonic()
        if path is None:
            return
        with self._explained():
            self._file = path.open("ab", buffering=0)
            try:
                self._begin(path, earlier)
            except BaseException:
                self._file.close()
                raise

    def _begin(self, path: Path, earlier: Earlier) -> None:
        self._is_regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)  # not a pipe or a device
        if self._is_regular:
            _lock(path, self._file.fileno())
            if os.fstat(self._file.fileno()).st_size != earlier.end:
                raise RequestError(f"--output {path} has been written to by another run meanwhile.")
            sync_folder(path.parent)  # the name of a new file
            if earlier.num_lost_bytes:
                self._file.truncate(earlier.size)
            if earlier.lacks_newline:
                self._file.write(b"\n")

    def write(self, line: str) -> None:
        if self._file is None:
            emit(line, file=self._stdout)
            return
        data = memoryview(f"{line}\n".encode())
        with self._explained():
            while data:  # a disk that becomes full takes a part
                data = data[self._file.write(data) :]
            if time.monotonic() - self._synced >= SYNC_SECONDS:
                self._sync()

    def __enter__(self) -> "RecordFile":
        return self

    def __exit__(self, *exception) -> None:
        if self._file is not None:
            with self._explained(), self._file:
                self._sync()

    def _sync(self) -> None:
        if self._is_regular:
            sync(self._file.fileno())
            self._synced = time.monotonic()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # the reader has seen enough
            raise
        except OSError as error:
            raise TinyGPTError(
                f"--output {self._path} cannot be written ({error.strerror}): fix that, and give the same command "
                "again to continue."
            ) from None


def _lock(path: Path, descriptor: int) -> None:
    """Lock the file until it is closed. Raise RequestError if another run holds the lock."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RequestError(f"--output {path} is being written by another run: wait for its end.") from None
    except (ImportError, OSError):  # Windows, or a file system without locks
        return
