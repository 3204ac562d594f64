"""`generate --input`: check all prompts of a file, skip answered prompts, write each record as it finishes."""

import argparse
import json
import os
import signal
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import FailedRequestError, RequestError, Terminated, TinyGPTError
from ..weights.files import sync, sync_folder
from . import streams
from .flags import compiling, load_llm, warm_up
from .streams import PromptRecord, check_writable, counted, emit, log, progress, rates

if TYPE_CHECKING:
    from ..engine.prompts import Prompt
    from ..outputs import RequestOutput
    from ..sampling_params import SamplingParams

BEGINNING = b'{"id": '  # of every record: tells a half-written record from other text
SYNC_SECONDS = 1.0  # between two fsyncs: a power cut may cost their records


def record_line(record_id: str | int | None, model: str, dtype: str, output: "RequestOutput") -> str:
    """Return one line of JSON. `model` is as it was given; times are in seconds since the prompt's arrival."""
    first = output.metrics.time_to_first_token
    times = {
        "time_to_first_token": None if first is None else round(first, 6),
        "time_to_finish": round(output.metrics.time_to_finish, 6),
    }
    return _line(record_id, model, dtype, **asdict(output) | {"metrics": times})


def _line(record_id: str | int | None, model: str, dtype: str, **fields: Any) -> str:
    return json.dumps({"id": record_id, "model": model, "dtype": dtype, **fields}, ensure_ascii=False)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise Terminated for the first SIGTERM in the block; ignore later ones."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set a handler
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_batch(
    args: argparse.Namespace, params: "SamplingParams", kind_of: "Callable[[bytes], type[Run]]"
) -> None:
    """Answer the prompts of --input. Raise RequestError before any work, TinyGPTError at the end if a prompt failed.

    params: the defaults of a line's fields. kind_of: the file's bytes.
    """
    with sigterm_raises():
        source = Path(args.input)
        target = None if args.output is None else Path(args.output)
        if target is not None:
            check_writable("--output", target)
            if target.exists() and source.exists() and target.samefile(source):
                raise RequestError(f"--output {target} is the file of --input: name another one.")
        content = streams.read_bytes(f"--input {source}", source)
        kind = kind_of(content)
        prompts = kind.read(source, content, args, params)
        if not prompts:
            log(f"--input {source} holds no prompt, so there is nothing to do")
        earlier = Earlier() if target is None else kind.earlier_in(target, prompts, args)
        pending = [prompt for prompt in prompts if prompt.id not in earlier.ids]
        if len(pending) < len(prompts):
            skipped = f"{len(prompts) - len(pending)} of {counted(len(prompts), 'prompt')} skipped"
            log(f"{skipped}: {target} has their records; to make them with other flags, name another file")
        if earlier.num_lost_bytes:
            half = f"half a record of {counted(earlier.num_lost_bytes, 'byte')}"
            log(f"{target} ends in {half}, as a killed run leaves it: its prompt is answered again")
        num_failed = earlier.num_failed
        with open_records(target, earlier) as write:
            if pending:
                run = kind(args, pending, earlier, len(prompts), write)
                num_failed += run.answer_on_ray() if args.ray else run.answer()
        if num_failed:
            failed = f"{num_failed} of {counted(len(prompts), kind.item)} failed: {kind.reason}"
            again = "" if target is None else f"; to have them tried again, remove these lines from {target}"
            raise TinyGPTError(f"{failed}{again}.")


# The index of a pending prompt, and its result.
Found = tuple[int, "RequestOutput | FailedRequestError"]


@dataclass(frozen=True)
class Run:
    """`write` takes a record's line; `total` counts the answered prompts too."""

    item: ClassVar[str] = "prompt"
    reason: ClassVar[str] = '"error" in their records says why'
    args: argparse.Namespace
    pending: list[PromptRecord]
    earlier: "Earlier"
    total: int
    write: Callable[[str], None]

    @classmethod
    def read(
        cls, path: Path, content: bytes, args: argparse.Namespace, params: "SamplingParams"
    ) -> list[Any]:
        """Return the prompts of --input. Raise RequestError that lists every line with an error, by the model, too."""
        try:
            return streams.read_prompts(path, params, content)
        except RequestError:
            from ..on_ray.batch import prompt_check

            return streams.read_prompts(path, params, content, prompt_check(args))

    @classmethod
    def earlier_in(cls, path: Path, prompts: Iterable[Any], args: argparse.Namespace) -> "Earlier":
        return read_earlier(path, prompts, args.model, args.dtype)

    def answer(self) -> int:
        """Write a record of each pending prompt. Return the number of failed prompts."""
        llm, load_seconds = load_llm(self.args)
        # generate_as_finished checks when it is called, and runs when it is iterated.
        prompts = self._read(llm.dtype, llm.read_prompt, llm.generate_as_finished)
        warm_up(llm, self.args)
        before = llm.engine.throughput
        params = [record.params for record in self.pending]
        num_failed = self._write_all(
            llm.dtype, prompts, llm.generate_as_finished(prompts, params, return_exceptions=True)
        )
        done = f"{counted(len(prompts), 'prompt')}: {rates(llm.engine.throughput - before)}"
        log(f"{done}; load {load_seconds:.2f} s{compiling(self.args)}; seeds in their records")
        return num_failed

    def answer_on_ray(self) -> int:
        from ..on_ray.batch import outputs_on_ray, setup

        started = time.perf_counter()
        llm_args, inputs = setup(self.args)
        prompts = self._read(llm_args.dtype, inputs.read_prompt, inputs.request)
        count = min(self.args.ray, len(prompts))
        params = (record.params for record in self.pending)
        with outputs_on_ray(
            count, llm_args, [*zip(range(len(prompts)), prompts, params, strict=False)]
        ) as outputs:
            num_failed = self._write_all(llm_args.dtype, prompts, outputs)
        seconds = time.perf_counter() - started
        by = f"{counted(len(prompts), 'prompt')} by {counted(count, 'actor')}"
        log(f"{by} in {seconds:.2f} s; seeds in their records")
        return num_failed

    def _read(self, dtype: str, read: Callable, check: Callable) -> "list[Prompt]":
        """Encode each prompt by `read` and check it by `check`. Raise RequestError that lists all impossible lines."""
        if self.earlier.dtype not in (None, dtype):
            raise RequestError(
                f"the records of --output {self.args.output} were made with dtype {self.earlier.dtype} and this run "
                f"has {dtype}: give --dtype {self.earlier.dtype}, or name another file."
            )

        def checked(record: PromptRecord) -> "Prompt":
            prompt = read(record.prompt, record.split_special_tokens)
            check(prompt, record.params)
            return prompt

        return streams.read_lines(
            self.args.input, {record.line: partial(checked, record) for record in self.pending}
        )

    def _write_all(self, dtype: str, prompts: "list[Prompt]", outputs: Iterable[Found]) -> int:
        tally = Counter()

        def line_of(i: int, output: "RequestOutput | FailedRequestError") -> str:
            head = self.pending[i].id, self.args.model, dtype
            if isinstance(output, FailedRequestError):
                tally["failed"] += 1
                prompt = {"prompt": prompts[i].text, "prompt_token_ids": prompts[i].token_ids}
                return _line(*head, **prompt, error=str(output))
            tally["truncated"] += output.num_truncated_tokens > 0
            if self.pending[i].params.guidance is not None:
                tally["unfinished"] += sum(sample.finish_reason == "length" for sample in output.outputs)
            return record_line(*head, output)

        self.write_all(outputs, line_of)
        if count := tally["truncated"]:
            log(f"{counted(count, 'prompt')} truncated: see num_truncated_tokens in their records")
        if count := tally["unfinished"]:
            unfinished = f"{counted(count, 'guided text')} cut short by a limit"
            log(f'{unfinished}: "finish_reason": "length" in their records')
        return tally["failed"]

    def write_all(self, outputs: Iterable[tuple[int, Any]], line_of: Callable[[int, Any], str]) -> None:
        """Write the line of each output. outputs: with the index of a pending prompt."""
        args = self.args
        num_answered = self.total - len(self.pending)
        outputs = in_order(outputs) if args.keep_order else outputs
        try:
            for i, output in progress("prompt", "answered")(outputs, self.total, num_answered):
                self.write(line_of(i, output))
                num_answered += 1
        except KeyboardInterrupt as stop:
            how = f"in {args.output}; give the same command again to continue"
            if args.output is None:
                how = "on stdout; a run with --output FILE can be continued"
            raise type(stop)(f"{num_answered} of {counted(self.total, 'prompt')} answered, {how}") from None


class TextRun(Run):
    """A run of a file with a prompt in each line."""

    @classmethod
    def read(
        cls, path: Path, content: bytes, args: argparse.Namespace, params: "SamplingParams"
    ) -> list[Any]:
        return streams.read_text_lines(path, params, content)


def in_order(outputs: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    early: dict[int, Any] = {}
    num_given = 0
    for index, output in outputs:
        early[index] = output
        while num_given in early:
            yield num_given, early.pop(num_given)
            num_given += 1


@dataclass(frozen=True)
class Earlier:
    ids: frozenset[str | int] = frozenset()
    num_failed: int = 0  # records with an error
    dtype: str | None = None  # None: there are no records
    size: int = 0  # bytes of the complete records
    num_lost_bytes: int = 0  # of a half-written record after them
    lacks_newline: bool = False  # the last record is complete, but for the end of its line


def read_earlier(
    path: Path,
    prompts: Iterable[Any],
    model: str,
    dtype: str,
    record_in: "Callable[[bytes], dict[str, Any] | None] | None" = None,
    id_field: str = "id",
) -> Earlier:
    """Find the prompts that the file already answers. Raise RequestError for anything but records of this run.

    A half-written last record, as of a killed run, does not count. record_in, id_field: of another kind of records.
    """
    if not path.is_file():  # not there yet, or a device such as /dev/null
        return Earlier()
    try:
        with path.open("rb") as file:
            lines = file.readlines()
    except OSError as error:
        raise RequestError(f"--output {path} cannot be read: {error.strerror}.") from None
    prompt_of = {record.id: getattr(record, "prompt", None) for record in prompts}
    ids = set()
    num_failed = 0
    size = 0
    for number, line in enumerate(lines, 1):
        place = f"line {number} of --output {path}"
        record = (record_in or _record_in)(line)
        if record is None:
            if line.endswith(b"\n") or not line.startswith(BEGINNING[: len(line)]):
                raise RequestError(f"{place} is not a record of an earlier run: name another file.")
            break
        if record["id"] not in prompt_of:
            raise RequestError(
                f"{place} answers {id_field} {record['id']!r}, which --input does not have: name another file."
            )
        if "prompt" in record:
            _check_prompt(place, record, prompt_of[record["id"]])
        if "model" in record:
            _check_model(place, record["model"], model)
        if "auto" not in (record["dtype"], dtype) and record["dtype"] != dtype:
            raise RequestError(
                f"{place} was made with dtype {record['dtype']} and not {dtype}: name another file."
            )
        if record["id"] in ids:
            raise RequestError(
                f"{place} answers id {record['id']!r} a second time: remove one of the two lines."
            )
        if record["dtype"] != "auto":
            dtype = record["dtype"]  # if "auto" was given, the first record decides for the others
        ids.add(record["id"])
        num_failed += "error" in record
        size += len(line)
    num_lost_bytes = sum(map(len, lines)) - size
    lacks_newline = size > 0 and not num_lost_bytes and not lines[-1].endswith(b"\n")
    return Earlier(frozenset(ids), num_failed, dtype if ids else None, size, num_lost_bytes, lacks_newline)


def _record_in(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        record = json.loads(line)
        is_made_by = isinstance(record["model"], str) and isinstance(record["dtype"], str)
        if (
            type(record["id"]) in (str, int)
            and is_made_by
            and {"prompt", "prompt_token_ids"} <= record.keys()
        ):
            return record
    return None


def _check_prompt(place: str, record: dict[str, Any], prompt: str | list[int]) -> None:
    # [] became the BOS token.
    if prompt not in (record["prompt"], record["prompt_token_ids"], []):
        raise RequestError(
            f"{place} answers another prompt than the one with id {record['id']!r}: name another file."
        )


def _check_model(place: str, made_by: str, model: str) -> None:
    is_same = os.path.isdir(made_by) and os.path.isdir(model) and os.path.samefile(made_by, model)
    if made_by != model and not is_same:
        raise RequestError(f"{place} was made by model {made_by} and --model is {model}: name another file.")


@contextmanager
def open_records(path: Path | None, earlier: Earlier) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes a line to stdout, or to the file: locked, and synced each second and at the end."""
    if path is None:
        yield partial(emit, file=sys.stdout)  # the stream of now: Ray prints to another one
        return
    with _explained(path):
        file = path.open("ab", buffering=0)
    with file:
        descriptor = file.fileno()
        synced = time.monotonic()
        is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)  # not a pipe or a device
        if is_regular:
            with _explained(path):
                _lock(path, descriptor)
                if os.fstat(descriptor).st_size != earlier.size + earlier.num_lost_bytes:
                    raise RequestError(f"--output {path} has been written to by another run meanwhile.")
                sync_folder(path.parent)  # the name of a new file
                if earlier.num_lost_bytes:
                    file.truncate(earlier.size)
                if earlier.lacks_newline:
                    file.write(b"\n")

        def write(line: str) -> None:
            nonlocal synced
            content = memoryview(f"{line}\n".encode("utf-8", "backslashreplace"))
            with _explained(path):
                # Earlier lines: Ctrl-C in a slow sync after the line would leave it uncounted.
                if is_regular and time.monotonic() - synced >= SYNC_SECONDS:
                    sync(descriptor)
                    synced = time.monotonic()
                while content:  # a disk that becomes full takes a part
                    content = content[file.write(content) :]

        try:
            yield write
        finally:
            if is_regular:
                with _explained(path):
                    sync(descriptor)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # the reader has seen enough
        raise
    except OSError as error:
        how = "fix that, and give the same command again to continue"
        raise TinyGPTError(f"--output {path} cannot be written ({error.strerror}): {how}.") from None


def _lock(path: Path, descriptor: int) -> None:
    """Lock the file until it is closed. Raise RequestError if another run holds the lock."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RequestError(f"--output {path} is being written by another run: wait for its end.") from None
    except (ImportError, OSError):  # Windows, or a file system without locks
        return
