"""The file behind --output: records are appended as they finish, and an interrupted run can be continued."""

import json
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinygpt.cli.batch.records import BEGINNING
from tinygpt.cli.input.prompts_file import PromptRecord
from tinygpt.disk import sync, sync_folder
from tinygpt.errors import RequestError, TinyGPTError

AGAIN = "Give the same command again, which goes on behind its records, or name another output file."
SYNC_SECONDS = 1.0  # between two times that records are made sure of: a power cut may cost those of a second


@dataclass(frozen=True)
class Earlier:
    """What an earlier run left in the file: the ids it answered, with which dtype, and the size of its whole records.

    num_failed: how many of the answers are errors. `dtype` is None where there are no records; `size` is in bytes.
    `end` is the file's size, a last record included that was being written when the run was killed. lacks_newline: the
    last whole record is the file's end, and only its line is not.
    """

    ids: frozenset[str | int] = frozenset()
    num_failed: int = 0
    dtype: str | None = None
    size: int = 0
    end: int = 0
    lacks_newline: bool = False

    @property
    def num_lost_bytes(self) -> int:
        """Of half a record."""
        return self.end - self.size


def check_output(path: Path, input_path: Path) -> None:
    """RequestError for a path that can be no output: it is a folder, in none, or the input."""
    if path.is_dir():
        raise RequestError(f"--output {path} is a folder: name a file in it.")
    if not path.parent.is_dir():
        raise RequestError(f"the folder of --output {path} does not exist: create it first.")
    if path.exists() and input_path.exists() and path.samefile(input_path):
        raise RequestError(f"--output {path} is the file of --input: name another one.")


def read_earlier(path: Path, prompts: Iterable[PromptRecord], model: str, dtype: str) -> Earlier:
    """Find what the file already answers; `model` and `dtype` are as the command was given them.

    Raises RequestError if the file holds anything but records of these prompts, made by this model in this dtype.
    A last line that is the beginning of a record was being written when the run was killed: it is not counted.
    """
    if not path.is_file():  # not there yet, or a device such as /dev/null
        return Earlier()
    prompt_of = {record.id: record.prompt for record in prompts}
    try:
        with path.open("rb") as file:
            return _read_records(path, file, prompt_of, model, dtype)
    except OSError as error:
        raise RequestError(f"--output {path} cannot be read ({error.strerror}): name another output file.") from None


def check_dtype(path: Path | None, earlier: Earlier, dtype: str) -> None:
    """RequestError if the model that has been loaded computes in another precision than the file's records."""
    if earlier.dtype not in (None, dtype):
        raise RequestError(
            f"the records of --output {path} were made with dtype {earlier.dtype} and this run has {dtype}: give "
            f"--dtype {earlier.dtype}, or name another output file."
        )


class RecordFile:
    """The file, open for whole lines behind its last whole record.

    Nothing is buffered here: the system has a line, or TinyGPTError says why not. The disk has all lines at each one
    that comes a second or more after it last had, and at the end.
    """

    def __init__(self, path: Path, earlier: Earlier):
        self._path = path
        with self._explained():
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            try:
                self._begin(path, earlier)
            except BaseException:
                os.close(self._descriptor)
                raise

    def _begin(self, path: Path, earlier: Earlier) -> None:
        self._is_kept = stat.S_ISREG(os.fstat(self._descriptor).st_mode)  # and no pipe or device
        self._synced = time.monotonic()
        if self._is_kept:
            _lock(path, self._descriptor)
            if os.fstat(self._descriptor).st_size != earlier.end:
                raise RequestError(f"--output {path} has been written to by another run meanwhile. {AGAIN}")
            sync_folder(path.parent)  # the file's name, where it is new
            if earlier.num_lost_bytes:
                os.ftruncate(self._descriptor, earlier.size)
            if earlier.lacks_newline:
                os.write(self._descriptor, b"\n")

    def write(self, line: str) -> None:
        data = memoryview(f"{line}\n".encode())
        with self._explained():
            while data:  # a disk that becomes full takes a part
                data = data[os.write(self._descriptor, data) :]
            if not 0 <= time.monotonic() - self._synced < SYNC_SECONDS:
                self._sync()

    def __enter__(self) -> "RecordFile":
        return self

    def __exit__(self, *exception) -> None:
        try:
            with self._explained():
                self._sync()
        finally:
            os.close(self._descriptor)

    def _sync(self) -> None:
        if self._is_kept:
            sync(self._descriptor)
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
                "again, which goes on behind the records that are in the file."
            ) from None


def _lock(path: Path, descriptor: int) -> None:
    """Keep other runs from writing to the file until this one closes it; RequestError if one is writing."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RequestError(f"--output {path} is being written by another run: wait for its end. {AGAIN}") from None
    except OSError:  # a file system that has no locks
        return


def _read_records(
    path: Path, file: Iterable[bytes], prompt_of: dict[str | int, str | list[int]], model: str, dtype: str
) -> Earlier:
    ids, num_failed, size, end, lacks_newline = set(), 0, 0, 0, False
    for number, line in enumerate(file, 1):
        place = f"line {number} of --output {path}"
        end += len(line)
        lacks_newline = not line.endswith(b"\n")
        record = _record_in(line)
        if record is None:
            _check_half_record(place, line)
            break
        _check_prompt(place, record, prompt_of)
        _check_maker(place, record, model, dtype)
        dtype = record["dtype"]  # where "auto" was given, the first record says what the others must have
        if record["id"] in ids:
            raise RequestError(f"{place} answers id {record['id']!r} a second time: remove one of the two lines.")
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


def _check_prompt(place: str, record: dict[str, Any], prompt_of: dict[str | int, str | list[int]]) -> None:
    if record["id"] not in prompt_of:
        raise RequestError(
            f"{place} answers id {record['id']!r}, which --input does not have: name another output file, or give "
            "its prompt again."
        )
    if prompt_of[record["id"]] not in (record["prompt"], record["prompt_token_ids"], []):  # [] became the BOS token
        raise RequestError(
            f"{place} answers another prompt than the one that has id {record['id']!r} in --input: name another "
            "output file, or give the prompts ids of their own."
        )


def _check_maker(place: str, record: dict[str, Any], model: str, dtype: str) -> None:
    if not _is_same_model(record["model"], model):
        raise RequestError(
            f"{place} was made by model {record['model']} and --model is {model}: give --model {record['model']}, or "
            "name another output file."
        )
    if dtype not in ("auto", record["dtype"]):
        raise RequestError(
            f"{place} was made with dtype {record['dtype']} and not {dtype}: give --dtype {record['dtype']}, or name "
            "another output file."
        )


def _check_half_record(place: str, line: bytes) -> None:
    """RequestError unless a line, the file's last, is what a run that was killed leaves."""
    if line.endswith(b"\n") or not line.startswith(BEGINNING.encode()[: len(line)]):
        raise RequestError(f"{place} is no record of an earlier run: name another file.")


def _is_same_model(one: str, other: str) -> bool:
    """Whether two spellings of --model name one checkpoint: a folder has many."""
    return one == other or (os.path.isdir(one) and os.path.isdir(other) and os.path.samefile(one, other))
