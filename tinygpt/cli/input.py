"""Input of the commands: the text of a file or of stdin, and the prompts of a JSONL file."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinygpt.cli.flags import ALIASES, with_seed
from tinygpt.cli.output import counted, log
from tinygpt.errors import RequestError, suggest
from tinygpt.sampling_params import SAMPLING_FIELDS, SamplingParams

STDIN = "-"
MAX_LISTED = 20  # lines with problems that an error lists
EXAMPLE = json.dumps({"prompt": "Once upon a time"})
PROMPT_FIELDS = ("prompt", "prompt_token_ids")
_PARAMS_FIELDS = tuple(name for name in SAMPLING_FIELDS if name != "logits_processors")  # JSON has no functions
_FIELDS = (*PROMPT_FIELDS, "id", "split_special_tokens", *_PARAMS_FIELDS)
_FIELD_OF_ALIAS = {alias: name for name, aliases in ALIASES.items() for alias in aliases if name in _PARAMS_FIELDS}


def read_bytes(flag: str, path: str | Path) -> bytes:
    """Return the content of a file, or of stdin for "-". Raise RequestError if it cannot be read."""
    if str(path) == STDIN:
        return read_stdin()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise RequestError(f"{flag} {path} cannot be read: {error.strerror}.") from None


def read_stdin() -> bytes:
    if sys.stdin is None:  # the descriptor was closed, as by `<&-`
        raise RequestError("no PROMPT was given and stdin is closed: give a PROMPT, or --input.")
    if sys.stdin.isatty():
        log("reading from the terminal; end it with Ctrl-D (on Windows: Ctrl-Z, Enter)")
    return sys.stdin.buffer.read()


def text_of_stdin() -> str:
    text = decode("stdin", read_stdin())
    if not text:
        log("stdin is empty: the text starts from the BOS token")
    return text


def decode(name: str, data: bytes) -> str:
    """Return UTF-8 as text. Raise RequestError, which begins with `name`, for other data."""
    from tinygpt.evaluation.texts import check_encoding

    check_encoding(name, data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 text: see its byte {error.start}, or convert it first.") from None


@dataclass(frozen=True)
class PromptRecord:
    """One line of a file of prompts."""

    line: int  # counted from 1
    id: str | int
    prompt: str | list[int]
    split_special_tokens: bool | None  # None: as on the command line
    params: SamplingParams


def read_prompts(path: Path, defaults: SamplingParams) -> list[PromptRecord]:
    """Return the prompts of a JSONL file; a line's fields replace those of `defaults`. Blank lines hold no prompt.

    Raise RequestError that lists every invalid line.
    """
    from tinygpt.evaluation.texts import check_encoding

    data = read_bytes("--input", path)
    check_encoding(f"--input {path}", data)
    records, problems = {}, {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = _read_line(number, line, defaults)
            if record.id in records:
                raise RequestError(f"id {record.id!r} is already that of line {records[record.id].line}.")
            records[record.id] = record
        except RequestError as error:
            problems[number] = str(error)
    refuse_lines(path, problems)
    return list(records.values())


def refuse_lines(path: Path, problems: dict[int, str]) -> None:
    """Raise RequestError that lists the lines with problems, if there are any."""
    if not problems:
        return
    listed = [f"  line {number}: {problem}" for number, problem in list(problems.items())[:MAX_LISTED]]
    if len(problems) > MAX_LISTED:
        listed.append(f"  and {len(problems) - MAX_LISTED} more")
    source = "stdin" if str(path) == STDIN else path
    headline = f"{counted(len(problems), 'line')} of {source} cannot be used, so nothing was generated:"
    raise RequestError("\n".join([headline, *listed]))


def _read_line(number: int, line: bytes, defaults: SamplingParams) -> PromptRecord:
    fields = _read_object(line)
    unknown = [name for name in fields if name not in _FIELDS]
    if unknown:
        raise RequestError(f"unknown field {json.dumps(unknown[0])}{suggest(unknown[0], _FIELDS) or '.'}")
    record_id = fields.pop("id", number)
    if type(record_id) is not int and not (isinstance(record_id, str) and is_unicode(record_id)):
        raise RequestError(f"id is {json.dumps(record_id)} and must be a text or a whole number.")
    given = [fields.pop(name) for name in PROMPT_FIELDS if name in fields]
    if len(given) != 1 or not isinstance(given[0], (str, list)):
        raise RequestError("one field prompt, a text or a list of token ids, is needed (or prompt_token_ids).")
    split_special_tokens = fields.pop("split_special_tokens", None)
    if split_special_tokens is not None and not isinstance(split_special_tokens, bool):
        raise RequestError(f"split_special_tokens is {json.dumps(split_special_tokens)} and must be true or false.")
    if isinstance(biases := fields.get("logit_bias"), dict):  # keys are texts in JSON; int() refuses 5000 digits
        is_number = {key: key.isdecimal() and len(key) <= 20 for key in biases}
        fields["logit_bias"] = {int(key) if is_number[key] else key: bias for key, bias in biases.items()}
    return PromptRecord(number, record_id, given[0], split_special_tokens, with_seed(replace(defaults, **fields)))


def _read_object(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line, object_pairs_hook=_without_duplicates)
    except RequestError:
        raise
    except json.JSONDecodeError as error:
        raise RequestError(f"not JSON at character {error.colno}: {error.msg}; a line is as {EXAMPLE}.") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"not UTF-8 text: see its byte {error.start}.") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or deep nesting
        raise RequestError(f"not JSON that can be read: {error}.") from None
    if not isinstance(fields, dict):
        raise RequestError(f"not a JSON object; a line is as {EXAMPLE}.")
    return _without_duplicates([(_FIELD_OF_ALIAS.get(name, name), value) for name, value in fields.items()])


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"{json.dumps(duplicate)} is there more than once: keep one.")
    return fields


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode the text: JSON and file names may hold lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
