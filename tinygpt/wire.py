"""Requests and outputs as JSON between `server/` and `remote.py`, without loss.

Minus infinity is a string, as JSON has no infinity. Times count from the arrival, as the clocks differ.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from .errors import RequestError, ServerError
from .fields import MAX_COUNT
from .outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk
from .sampling_params import ALL, SamplingParams

ALWAYS_SENT = ("max_tokens", "temperature")  # the server has other defaults
UNSENDABLE = ("logits_processors", "prompt_embeds", "capture", "edits")
MOMENTS = ("scheduled", "first_token", "finished")
# Log probabilities: JSON has strings in place of token ids and minus infinity.
LOGPROBS = ("logprobs", "prompt_logprobs", "cumulative_logprob", "prompt_cumulative_logprob", "score")

# What reading an answer of another shape raises. RecursionError: of JSON that is nested too deep.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)

Record = TypeVar("Record")
Result = TypeVar("Result")


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that differ from their defaults, and fields with other defaults in a server."""
    default = SamplingParams()
    for name in UNSENDABLE:
        value = getattr(params, name)
        if value is not None and len(value):
            raise RequestError("cannot be sent to a server: use an LLM.", name)
    sent = {}
    for field in fields(params):
        value = getattr(params, field.name)
        if field.name in ALWAYS_SENT or (
            field.name not in UNSENDABLE and value != getattr(default, field.name)
        ):
            sent[field.name] = value
    if "logit_bias" in sent:
        sent["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
    for name in ("logprobs", "prompt_logprobs"):
        if sent.get(name) == ALL:
            sent[name] = MAX_COUNT  # the server names its limit
    if "repetition_detection" in sent:
        sent["repetition_detection"] = asdict(params.repetition_detection)
    return sent


def output_to_json(output: RequestOutput) -> dict[str, Any]:
    times = dict(vars(output.metrics))
    record = record_to_json(output)
    arrival = times.pop("arrival")
    del record["prompt"]  # the client has it
    record["metrics"] = times | {
        name: None if times[name] is None else times[name] - arrival for name in MOMENTS
    }
    return record | {"outputs": [*map(record_to_json, output.outputs)]}


def output_from_json(record: Mapping[str, Any], prompt: str | None, arrival: float) -> RequestOutput:
    """prompt: the text, if one was given. arrival: by this process's clock."""
    times = record["metrics"]
    moments = {name: None if times[name] is None else times[name] + arrival for name in MOMENTS}
    metrics = RequestMetrics(**{**times, **moments, "arrival": arrival})
    outputs = [record_from_json(CompletionOutput, sample) for sample in record["outputs"]]
    return record_from_json(
        RequestOutput, {**record, "prompt": prompt, "outputs": outputs, "metrics": metrics}
    )


def chunk_to_json(chunk: StreamChunk) -> dict[str, Any]:
    """Return the text, the token id, and all other fields that are not their defaults."""
    default = StreamChunk._field_defaults
    sent = {
        name: value
        for name, value in chunk._asdict().items()
        if name not in default or value != default[name]
    }
    return _coded(sent, _encode)


def record_to_json(record: Any) -> dict[str, Any]:
    return _coded(vars(record), _encode)


def record_from_json(kind: type[Record], record: Mapping[str, Any]) -> Record:
    return kind(**_coded(record, _decode))


def _coded(record: Mapping[str, Any], code: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: code(value) if name in LOGPROBS else value for name, value in record.items()}


def _encode(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(token_id): _encode(element) for token_id, element in value.items()}
    if isinstance(value, list):
        return [*map(_encode, value)]
    return "-inf" if value == -math.inf else value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return {int(key): _decode(element) for key, element in value.items()}
    if isinstance(value, list):
        return [*map(_decode, value)]
    return float(value) if isinstance(value, str) else value


def read_reply(parse: Callable[[Any], Result], reply: Any) -> Result:
    """Return parse(reply). Raise ServerError for a reply of another shape, of a server of another version."""
    try:
        return parse(reply)
    except ServerError:
        raise
    except MALFORMED as error:
        message = "the server's reply is none that this version reads: are both ends the same version?"
        raise ServerError(message) from error


def checked_text(value: Any) -> str:
    """Return a text, or raise TypeError, which `read_reply` reads as another shape."""
    if not isinstance(value, str):
        raise TypeError
    return value
