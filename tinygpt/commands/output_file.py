"""The file behind --output: records are appended as they finish, and an interrupted run can be continued."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tinygpt.commands.prompts_file import PromptRecord
from tinygpt.commands.records import BEGINNING
from tinygpt.errors import RequestError


@dataclass(frozen=True)
class Earlier:
    """What an earlier run left in the file: the ids it answered, and the size of its whole records in bytes."""

    ids: frozenset[str | int] = frozenset()
    size: int = 0


def check_output(path: Path, input_path: Path) -> None:
    """RequestError for a path that can be no output: its folder is not there, or it is the input."""
    if not path.parent.is_dir():
        raise RequestError(f"the folder of --output {path} does not exist: create it first.")
    if path.exists() and input_path.exists() and path.samefile(input_path):
        raise RequestError(f"--output {path} is the file of --input: name another one.")


def read_earlier(path: Path, prompts: Iterable[PromptRecord]) -> Earlier:
    """Find what the file already answers. RequestError if it holds anything but records of these prompts.

    A last line without its end was being written when the run was killed: it is not counted.
    """
    if not path.is_file():  # not there yet, or a device such as /dev/null
        return Earlier()
    prompt_of = {record.id: record.prompt for record in prompts}
    ids, size = set(), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                _check_beginning(path, number, line)
                break
            ids.add(_answered_id(path, number, line, prompt_of))
            size += len(line)
    return Earlier(frozenset(ids), size)


def open_after(path: Path, earlier: Earlier) -> BinaryIO:
    """Open the file for appending, behind its last whole record."""
    if path.is_file() and path.stat().st_size > earlier.size:
        os.truncate(path, earlier.size)
    return path.open("ab")


def _answered_id(path: Path, number: int, line: bytes, prompt_of: dict) -> str | int:
    try:
        record = json.loads(line)
        record_id, prompt, token_ids = record["id"], record["prompt"], record["prompt_token_ids"]
        is_known = record_id in prompt_of
    except (ValueError, KeyError, TypeError):
        raise RequestError(_foreign(path, number)) from None
    if is_known and prompt_of[record_id] not in (prompt, token_ids, []):  # [] became the BOS token
        raise RequestError(
            f"line {number} of --output {path} answers another prompt than the one that has id {record_id!r} "
            "in --input: name another output file, or give the prompts ids of their own."
        )
    return record_id


def _check_beginning(path: Path, number: int, line: bytes) -> None:
    beginning = BEGINNING.encode()
    if not line.startswith(beginning[: len(line)]):
        raise RequestError(_foreign(path, number))


def _foreign(path: Path, number: int) -> str:
    return f"line {number} of --output {path} is no record of an earlier run: name another file."
