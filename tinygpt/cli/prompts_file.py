"""The file behind --input: one prompt a line, all of them checked before any work."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinygpt.cli.messages import counted
from tinygpt.cli.records import is_unicode
from tinygpt.cli.sampling_flags import with_seed
from tinygpt.errors import RequestError
from tinygpt.request.prompts import PROMPT_FIELDS, checked_salt
from tinygpt.sampling_params import SamplingParams

MAX_LISTED = 20


@dataclass(frozen=True)
class PromptRecord:
    """One line of the file."""

    line: int  # counted from 1
    id: str | int
    prompt: str | list[int]
    split_special_tokens: bool | None  # None: as the command line says
    params: SamplingParams
    cache_salt: str | None


def read_prompts(path: Path, defaults: SamplingParams) -> list[PromptRecord]:
    """Read every line; a line's own sampling fields come before `defaults`, and blank lines hold no prompt.

    Raises RequestError that lists the lines which cannot be used, or says why the file cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RequestError(f"--input {path} cannot be read ({error.strerror}): give a JSONL file.") from None
    records, problems = {}, {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = _read_line(number, line, defaults)
            if record.id in records:
                raise RequestError(f"id {record.id!r} is already that of line {records[record.id].line}.")
            records[record.id] = record
        except RequestError as error:
            problems[number] = str(error)
    refuse(path, problems)
    return list(records.values())


def refuse(path: Path, problems: dict[int, str]) -> None:
    """RequestError that lists the lines with problems, if there are any."""
    if not problems:
        return
    listed = [f"  line {number}: {problem}" for number, problem in list(problems.items())[:MAX_LISTED]]
    if len(problems) > MAX_LISTED:
        listed.append(f"  and {len(problems) - MAX_LISTED} more")
    headline = f"{counted(len(problems), 'line')} of {path} cannot be used, so nothing was generated:"
    raise RequestError("\n".join([headline, *listed]))


def _read_line(number: int, line: bytes, defaults: SamplingParams) -> PromptRecord:
    try:
        fields = json.loads(line, object_pairs_hook=_fields_of)
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise RequestError(f"a JSON object is expected, such as {json.dumps({'prompt': 'Once upon a time'})}.")
    record_id = _checked_id(fields.pop("id", number))
    prompt, split_special_tokens = _pop_prompt(fields), _pop_switch(fields)
    cache_salt = checked_salt(fields.pop("cache_salt", None))
    if isinstance(fields.get("logit_bias"), dict):  # JSON's keys are texts
        fields["logit_bias"] = {_token_id(key): bias for key, bias in fields["logit_bias"].items()}
    params = with_seed(replace(defaults, **fields))
    return PromptRecord(number, record_id, prompt, split_special_tokens, params, cache_salt)


def _fields_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = {}
    for name, value in pairs:
        if name in fields:
            raise RequestError(f"{json.dumps(name)} is there more than once: keep one.")
        fields[name] = value
    return fields


def _token_id(key: str) -> str | int:
    """A key as a number, if it can be a token id: Python reads no number of thousands of digits."""
    return int(key) if key.isdecimal() and len(key) <= 20 else key


def _pop_prompt(fields: dict[str, Any]) -> str | list[int]:
    given = [fields.pop(name) for name in PROMPT_FIELDS if name in fields]
    if len(given) != 1:
        raise RequestError("one field prompt, a text or a list of token ids, is needed (or prompt_token_ids).")
    if not isinstance(given[0], (str, list)):
        raise RequestError(f"prompt is {json.dumps(given[0])} and must be a text or a list of token ids.")
    return given[0]


def _pop_switch(fields: dict[str, Any]) -> bool | None:
    given = fields.pop("split_special_tokens", None)
    if given is not None and not isinstance(given, bool):
        raise RequestError(f"split_special_tokens is {json.dumps(given)} and must be true or false.")
    return given


def _checked_id(record_id: Any) -> str | int:
    if isinstance(record_id, int) and not isinstance(record_id, bool):
        return record_id
    if isinstance(record_id, str) and is_unicode(record_id):
        return record_id
    raise RequestError(f"id is {json.dumps(record_id)} and must be a text or a whole number.")
