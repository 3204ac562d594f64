"""The JSON record of a prompt: what --json prints and --output keeps."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinygpt.outputs import RequestOutput
    from tinygpt.request.prompts import Prompt

# How every record begins: by this an interrupted run's last, half-written record is told from foreign text.
BEGINNING = '{"id": '


def record_line(record_id: str | int | None, model: str, dtype: str, output: "RequestOutput") -> str:
    """One line of JSON: id, model as it was given, dtype of its weights, then RequestOutput's fields by their names.

    Times are in seconds since the prompt's arrival, without those in which kernels were compiled.
    """
    metrics = output.metrics
    first = metrics.time_to_first_token
    times = {
        "time_to_first_token": None if first is None else round(first, 6),
        "time_to_finish": round(metrics.time_to_finish, 6),
    }
    record = {"id": record_id, "model": model, "dtype": dtype, **asdict(output), "metrics": times}
    return _line(record)


def failure_line(record_id: str | int, model: str, dtype: str, prompt: "Prompt", error: str) -> str:
    """The record of a prompt that could not go on: `error` says why, in place of all that comes of one."""
    given = {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids}
    return _line({"id": record_id, "model": model, "dtype": dtype, **given, "error": error})


def _line(record: dict[str, Any]) -> str:
    line = json.dumps(record, ensure_ascii=False)
    return line if is_unicode(line) else json.dumps(record)


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can spell it: not a lone surrogate, which JSON can, and which file names may hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
