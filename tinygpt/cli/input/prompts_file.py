"""The file behind --input: one prompt a line, all of them checked before any work."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tinygpt.cli.batch.records import is_unicode
from tinygpt.cli.flags.sampling import DEFAULTS, with_seed
from tinygpt.cli.input.other_formats import advice_for_text, check_is_no_array, check_is_no_table
from tinygpt.cli.input.text import STDIN, read_bytes
from tinygpt.cli.output.messages import counted
from tinygpt.cli.output.wording import Worded, for_json
from tinygpt.errors import RequestError
from tinygpt.evaluation.texts import check_encoding
from tinygpt.guided_grammar import check_grammar
from tinygpt.request.prompts import PROMPT_FIELDS, checked_salt
from tinygpt.sampling_params import SamplingParams
from tinygpt.suggestions import field_hint, is_already, nearest_field

MAX_LISTED = 20
_EXPECTED = f"A line is a JSON object, such as {json.dumps({'prompt': 'Once upon a time'})}."
_FUNCTIONS = "logits_processors"  # which JSON has not
_FIELDS = (
    *PROMPT_FIELDS,
    "id",
    "cache_salt",
    "split_special_tokens",
    *(name for name in DEFAULTS if name != _FUNCTIONS),
)


@dataclass(frozen=True)
class PromptRecord:
    """One line of the file."""

    line: int  # counted from 1
    id: str | int
    prompt: str | list[int]
    split_special_tokens: bool | None  # None: as the command line says
    params: SamplingParams
    cache_salt: str | None


@dataclass(frozen=True)
class PromptsFile:
    """The lines of a file that can be used, and what is wrong with each other, by its number."""

    path: Path
    records: list[PromptRecord]
    problems: dict[int, str]
    advice: str = ""  # on all problems

    def refuse(self, more: dict[int, str]) -> None:
        """RequestError that lists the lines with problems, if there are any; `more` are those that a model has."""
        problems = sorted({**self.problems, **more}.items())
        if not problems:
            return
        listed = [f"  line {number}: {problem}" for number, problem in problems[:MAX_LISTED]]
        if len(problems) > MAX_LISTED:
            listed.append(f"  and {len(problems) - MAX_LISTED} more")
        source = "stdin" if str(self.path) == STDIN else self.path
        headline = f"{counted(len(problems), 'line')} of {source} cannot be used, so nothing was generated:"
        raise Worded("\n".join([headline, *listed, *[self.advice] * bool(self.advice)]))


def read_lines(path: Path, defaults: SamplingParams) -> PromptsFile:
    """Read every line; a line's own sampling fields come before `defaults`, and blank lines hold no prompt.

    Raises RequestError that says why the file cannot be read.
    """
    data = read_bytes("--input", path, "a JSONL file")
    check_encoding(f"--input {path}", data)
    check_is_no_array(path, data)
    check_is_no_table(path, data)
    records, problems = {}, {}
    check = lru_cache(check_grammar)  # many lines may have the same one
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = _read_line(number, line, defaults, check)
            if record.id in records:
                raise RequestError(f"id {record.id!r} is already that of line {records[record.id].line}.")
            records[record.id] = record
        except RequestError as error:
            problems[number] = in_json_words(error)
    return PromptsFile(path, list(records.values()), problems, advice_for_text(path, data, problems))


def in_json_words(error: RequestError) -> str:
    """What is wrong with a line, as one who writes JSON would have it."""
    return for_json(str(error), DEFAULTS)


def _read_line(
    number: int, line: bytes, defaults: SamplingParams, check_guidance: Callable[[str, Any], None]
) -> PromptRecord:
    fields = _read_object(line)
    _check_names(fields)
    record_id = _checked_id(fields.pop("id", number))
    prompt, split_special_tokens = _pop_prompt(fields), _pop_switch(fields)
    cache_salt = checked_salt(fields.pop("cache_salt", None))
    if isinstance(fields.get("logit_bias"), dict):  # JSON's keys are texts
        fields["logit_bias"] = {_token_id(key): bias for key, bias in fields["logit_bias"].items()}
    params = with_seed(replace(defaults, **fields))
    if params.guidance is not None:
        check_guidance(*params.guidance)
    return PromptRecord(number, record_id, prompt, split_special_tokens, params, cache_salt)


def _read_object(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line, object_pairs_hook=_fields_of)
    except RequestError:
        raise
    except json.JSONDecodeError as error:
        raise RequestError(f"not JSON at character {error.colno}: {error.msg}. {_EXPECTED}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"not JSON, as it is not UTF-8 text: see its byte {error.start}.") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON that can be read: {error}.") from None
    if not isinstance(fields, dict):
        raise RequestError(f"not an object. {_EXPECTED}")
    return fields


def _check_names(fields: dict[str, Any]) -> None:
    """RequestError for fields that do not exist, with those that may have been meant."""
    unknown = [name for name in fields if name not in _FIELDS]
    if not unknown:
        return
    hints = {name: _hint(name) for name in unknown}
    listed = [json.dumps(name) + (f" ({hint})" if hint else "") for name, hint in hints.items()]
    rest = "" if all(hints.values()) else "; fields are named as the flags that `tinygpt generate --help-all` lists"
    raise RequestError(f"unknown field {', '.join(listed)}{rest}.")


def _hint(unknown: str) -> str | None:
    if is_already(unknown):
        return "that is how it is: leave it out"
    if nearest_field(unknown, (*_FIELDS, _FUNCTIONS)) == _FUNCTIONS:
        return "functions are for the library"
    return field_hint(unknown, _FIELDS, json.dumps)


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
