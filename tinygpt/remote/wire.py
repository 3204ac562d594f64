"""What goes over the wire, at both ends: requests and outputs as JSON, of which nothing is lost.

An id as a key is a text there, and so is minus infinity, the logarithm of 0, for which JSON has no number.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from tinygpt.errors import RequestError, ServerError
from tinygpt.field_rules import MAX_COUNT
from tinygpt.outputs import CompletionOutput, ContinuationScore, RequestMetrics, RequestOutput, StreamChunk
from tinygpt.sampling_params import ALL, SamplingParams

PATH, SCORE_PATH = "/generate", "/score_continuations"
ALWAYS = ("max_tokens", "temperature")  # sent whatever they are: servers have other defaults
SUMS = ("cumulative_logprob", "score")
MOMENTS = ("scheduled", "first_token", "finished")  # of RequestMetrics; what it has besides is no time of day
UNSENDABLE = ("logits_processors", "prompt_embeds")
_DEFAULTS = SamplingParams()

Logprobs = dict[int, float]
Number = float | Literal["-inf"]


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not as they would be without being sent."""
    given = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    given = {name: value for name, value in given.items() if name in ALWAYS or _is_set(name, value)}
    for name in UNSENDABLE:
        if name in given:
            raise RequestError(f"{name} cannot be sent to a server: leave it out, or run the model here, in an LLM.")
    if "logit_bias" in given:
        given["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
    for name in ("logprobs", "prompt_logprobs"):
        if given.get(name) == ALL:  # servers have a limit, and say of a large number what it is
            given[name] = MAX_COUNT
    if "repetition_detection" in given:
        given["repetition_detection"] = dataclasses.asdict(params.repetition_detection)
    return given


def _is_set(name: str, value: Any) -> bool:
    return value is not None if name == "prompt_embeds" else value != getattr(_DEFAULTS, name)


def output_to_json(output: RequestOutput) -> dict[str, Any]:
    """Times are in seconds since the request's arrival: the two ends have different clocks."""
    metrics = dataclasses.asdict(output.metrics)
    arrival = metrics.pop("arrival")
    since = {name: None if metrics[name] is None else metrics[name] - arrival for name in MOMENTS}
    return {
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [_sample_to_json(sample) for sample in output.outputs],
        "metrics": {**metrics, **since},
        "prompt_logprobs": _list_to_json(output.prompt_logprobs),
        "prompt_cumulative_logprob": _number_to_json(output.prompt_cumulative_logprob),
        "num_cached_tokens": output.num_cached_tokens,
        "num_truncated_tokens": output.num_truncated_tokens,
    }


def output_from_json(found: Mapping[str, Any], prompt: str | None, arrival: float) -> RequestOutput:
    """prompt: the text as it was given. arrival: when that was, by this process's clock."""
    metrics = found["metrics"]
    since = {name: None if metrics[name] is None else arrival + metrics[name] for name in MOMENTS}
    return RequestOutput(
        prompt=prompt,
        prompt_token_ids=found["prompt_token_ids"],
        outputs=[_sample_from_json(sample) for sample in found["outputs"]],
        metrics=RequestMetrics(arrival, **{**metrics, **since}),
        prompt_logprobs=_list_from_json(found["prompt_logprobs"]),
        prompt_cumulative_logprob=_number_from_json(found["prompt_cumulative_logprob"]),
        num_cached_tokens=found["num_cached_tokens"],
        num_truncated_tokens=found["num_truncated_tokens"],
    )


def chunk_to_json(chunk: StreamChunk) -> dict[str, Any]:
    """What a chunk has beside its defaults."""
    found: dict[str, Any] = {"text": chunk.text, "token_id": chunk.token_id}
    if chunk.finish_reason is not None:
        found["finish_reason"] = chunk.finish_reason
    if chunk.stop_reason is not None:
        found["stop_reason"] = chunk.stop_reason
    if chunk.index:
        found["index"] = chunk.index
    if chunk.logprobs is not None:
        found["logprobs"] = _to_json(chunk.logprobs)
    if chunk.prompt_logprobs is not None:
        found["prompt_logprobs"] = _list_to_json(chunk.prompt_logprobs)
    return found


def chunk_from_json(found: Mapping[str, Any]) -> StreamChunk:
    logprobs = {"logprobs": _from_json(found["logprobs"])} if "logprobs" in found else {}
    if "prompt_logprobs" in found:
        logprobs["prompt_logprobs"] = _list_from_json(found["prompt_logprobs"])
    return StreamChunk(**{**found, **logprobs})


def score_to_json(score: ContinuationScore) -> dict[str, Any]:
    return {**dataclasses.asdict(score), "logprobs": [*map(_number_to_json, score.logprobs)]}


def score_from_json(found: Mapping[str, Any]) -> ContinuationScore:
    return ContinuationScore(**{**found, "logprobs": [*map(_number_from_json, found["logprobs"])]})


def _sample_to_json(sample: CompletionOutput) -> dict[str, Any]:
    found = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
    sums = {name: _number_to_json(found[name]) for name in SUMS}
    return {**found, **sums, "logprobs": _list_to_json(sample.logprobs)}


def _sample_from_json(found: Mapping[str, Any]) -> CompletionOutput:
    sums = {name: _number_from_json(found[name]) for name in SUMS}
    return CompletionOutput(**{**found, **sums, "logprobs": _list_from_json(found["logprobs"])})


def _list_to_json(found: list[Logprobs | None] | None) -> list[dict[str, Number] | None] | None:
    return None if found is None else [None if logprobs is None else _to_json(logprobs) for logprobs in found]


def _list_from_json(found: list[dict[str, Number] | None] | None) -> list[Logprobs | None] | None:
    return None if found is None else [None if logprobs is None else _from_json(logprobs) for logprobs in found]


def _to_json(logprobs: Logprobs) -> dict[str, Number]:
    return {str(token_id): _number_to_json(logprob) for token_id, logprob in logprobs.items()}


def _from_json(logprobs: Mapping[str, Number]) -> Logprobs:
    return {int(key): _number_from_json(logprob) for key, logprob in logprobs.items()}


def _number_to_json(number: float | None) -> Number | None:
    return "-inf" if number == -math.inf else number


def _number_from_json(number: Number | None) -> float | None:
    return float(number) if isinstance(number, str) else number


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """ServerError for a reply that has not what its reader looks for."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(
            "the server's reply is none that this version reads: are both ends the same version?"
        ) from error
