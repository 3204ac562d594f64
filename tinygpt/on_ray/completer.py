"""Completer: the class for `Dataset.map_batches`, with an LLM in each actor."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import FailedRequestError, RequestError
from ..fields import token_id_of
from ..llm import LLM
from ..outputs import RequestOutput
from ..sampling_params import SamplingParams

COLUMNS = ("generated_text", "generated_token_ids", "finish_reason", "error")


class Completer:
    """Continue the prompts of a Ray Dataset; a refused or failed row gets an error.

        dataset.map_batches(
            Completer,
            fn_constructor_kwargs={"params": {"max_tokens": 50, "seed": 1}, "model": "gpt2", "threads": 4},
            compute=ray.data.ActorPoolStrategy(size=2), num_cpus=4, batch_size=64,
        )

    Columns read: `prompt`, a text or token ids, and optionally `sampling_params`, fields that replace those of `params`
    unless None. COLUMNS are added; `error` or the others are None. A failure of the engine ends the job.
    arguments: LLM's without max_queue. Paths must be absolute, and threads must equal num_cpus.
    """

    def __init__(self, params: Mapping[str, Any] | None = None, **arguments: Any):
        if arguments.get("max_queue") is not None:
            raise RequestError(
                "max_queue is for callers who can come again, and a batch waits: leave it out."
            )
        self._params = _with_fields(SamplingParams(), params or {})
        self._llm = LLM(**arguments)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if "prompt" not in batch:
            raise RequestError(f"the rows have {', '.join(map(repr, batch))} and need a column 'prompt'.")
        prompts = batch["prompt"]
        rows_fields = batch.get("sampling_params", [None] * len(prompts))
        futures = [
            self._submit(prompt, fields or {}) for prompt, fields in zip(prompts, rows_fields, strict=True)
        ]
        rows = [*map(_row_of, futures)]
        return {**batch, **{name: _column([row[i] for row in rows]) for i, name in enumerate(COLUMNS)}}

    def _submit(self, prompt: Any, fields: Mapping[str, Any]) -> "Future[RequestOutput]":
        try:
            return self._llm.submit(_plain(prompt), _with_fields(self._params, fields))
        except RequestError as error:
            refused = Future()
            refused.set_exception(error)
            return refused


def _with_fields(params: SamplingParams, fields: Mapping[str, Any]) -> SamplingParams:
    if not isinstance(fields, Mapping):
        raise RequestError(
            f"sampling_params is {fields!r} and must be fields of SamplingParams and their values."
        )
    changes = {str(name): _plain(value) for name, value in fields.items() if value is not None}
    if isinstance(changes.get("logit_bias"), dict):  # Arrow has texts as keys, and the keys of all rows
        bias = changes["logit_bias"].items()
        changes["logit_bias"] = {token_id_of(key): value for key, value in bias if value is not None}
    params = replace(params, **changes)
    if params.n > 1:
        raise RequestError(
            f"n is {params.n} and a row has room for one sample: leave n at 1, and repeat the row."
        )
    return params


def _row_of(future: "Future[RequestOutput]") -> tuple[Any, ...]:
    try:
        sample = future.result().outputs[0]
    except (RequestError, FailedRequestError) as error:
        return None, None, None, str(error)
    return sample.text, sample.token_ids, sample.finish_reason, None


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _column(values: list[Any]) -> np.ndarray:
    column = np.empty(len(values), object)
    column[:] = values
    return column
