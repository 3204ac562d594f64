"""Input of the commands: the text of a file or of stdin, and the prompts of a JSONL file."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tinygpt.cli.flags import ALIASES, with_seed
from tinygpt.cli.output import counted, log
from tinygpt.errors import RequestError, TinyGPTError, suggest
from tinygpt.sampling_params import SAMPLING_FIELDS, SamplingParams

Result = TypeVar("Result")
STDIN = "-"
MAX_LISTED = 20  # lines with problems that an error lists
EXAMPLE = json.dumps({"prompt": "Once upon a time"})
PROMPT_FIELDS = ("prompt", "prompt_token_ids")
_PARAMS_FIELDS = tuple(name for name in SAMPLING_FIELDS if name != "logits_processors")  # JSON has no functions
_FIELDS = (*PROMPT_FIELDS, "id", "split_special_tokens", *_PARAMS_FIELDS)
_FIELD_OF_ALIAS = {alias: name for name, aliases in ALIASES.items() for alias in aliases if name in _PARAMS_FIELDS}


def read_bytes(name: str, path: str | Path) -> bytes:
    """Return the content of a file, or of stdin for "-". Raise RequestError, which begins with `name`."""
    from tinygpt.evaluation.texts import check_encoding

    if str(path) == STDIN:
        if sys.stdin is None:  # the descriptor was closed, as by `<&-`
            raise RequestError("no PROMPT was given and stdin is closed: give a PROMPT, or --input.")
        if sys.stdin.isatty():
            log("reading from the terminal; end it with Ctrl-D (on Windows: Ctrl-Z, Enter)")
        data = sys.stdin.buffer.read()
    else:
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise RequestError(f"{name} cannot be read: {error.strerror}.") from None
    check_encoding(name, data)
    return data


def read_text(name: str, path: str = STDIN) -> str:
    """Return a UTF-8 text as it is. Raise RequestError as `read_bytes`, and for other data."""
    data = read_bytes(name, path)
    if not data and path == STDIN:
        log("stdin is empty: the text starts from the BOS token")
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
    lines = enumerate(read_bytes(f"--input {path}", path).split(b"\n"), 1)
    line_of: dict[str | int, int] = {}

    def read(number: int, line: bytes) -> PromptRecord:
        record = _read_line(number, line, defaults)
        if record.id in line_of:
            raise RequestError(f"id {record.id!r} is already that of line {line_of[record.id]}.")
        line_of[record.id] = number
        return record

    return read_lines(path, {number: partial(read, number, line) for number, line in lines if line.strip()})


def read_lines(path: str | Path, readers: Mapping[int, Callable[[], Result]]) -> list[Result]:
    """Return what the reader of each line returns. Raise RequestError that lists every line with an error."""
    results, problems = [], []
    for number, read in readers.items():
        try:
            results.append(read())
        except TinyGPTError as error:
            problems.append(f"  line {number}: {error}")
    if problems:
        source = "stdin" if str(path) == STDIN else path
        headline = f"{counted(len(problems), 'line')} of {source} cannot be used, so nothing was generated:"
        more = [f"  and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
        raise RequestError("\n".join([headline, *problems[:MAX_LISTED], *more]))
    return results


def _read_line(number: int, line: bytes, defaults: SamplingParams) -> PromptRecord:
    fields = _read_object(line)
    unknown = [name for name in fields if name not in _FIELDS]
    if unknown:
        raise RequestError(f"unknown field {json.dumps(unknown[0])}{suggest(unknown[0], _FIELDS) or '.'}")
    record_id = fields.pop("id", number)
    if type(record_id) not in (int, str):
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
