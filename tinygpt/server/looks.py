"""Captures and edits of requests: read from JSON, refused without --look, and activations as JSON."""

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.prompts import Prompt
from ..errors import RequestError
from ..kernels import numbers
from ..llm import LLM
from ..look.edits import Edit
from ..sampling_params import SamplingParams
from .answers import ApiError
from .protocol import Array, LookFields

if TYPE_CHECKING:
    from .replies import TokenNames

FIELDS = ("capture", "edits", "extra_args")


def look_params(form: LookFields, is_allowed: bool, vectors: Mapping[str, Any]) -> dict[str, Any]:
    """Return `capture` and `edits` for SamplingParams. vectors: ControlVector by name. Raise ApiError, RequestError."""
    if not is_allowed and (given := [name for name in FIELDS if getattr(form, name) is not None]):
        raise ApiError(400, f"{given[0]} needs a server that was started with --look.", given[0])
    edits = [_edit(f"edits[{i}]", each) for i, each in enumerate(form.edits or ())]
    for name, strength in (form.steer or {}).items():
        if name not in vectors:
            known = f"it has {', '.join(vectors)}" if vectors else "start it with --control-vector NAME=FILE"
            raise ApiError(400, f"this server has no control vector {name!r}: {known}.", "steer")
        edits += vectors[name].edits(strength)
    names = [form.capture] if isinstance(form.capture, str) else list(form.capture or ())
    if form.extra_args is not None:
        names += [f"blocks.{layer}.hook_resid_post" for layer in form.extra_args.output_residual_stream]
    return {"capture": names or None, "edits": edits or None}


def check_size(llm: LLM, params: SamplingParams, prompts: list[Prompt]) -> None:
    """Raise RequestError if the captures of all samples together are larger than max_capture_bytes."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    count = len(prompts) * (params.best_of or params.n)
    llm._inputs.captures(params.capture, (), longest, longest + params.max_tokens - 1, count)


def lens_to_json(llm: LLM, prompt: Prompt, names: "TokenNames") -> dict[str, Any]:
    """Return each layer's best token, by the logit lens, and (L, H, T) of the last token's attention."""
    _, cache = llm.run_with_cache([prompt.token_ids], ["resid_post", "pattern"])
    layers = range(llm.config.n_layer)
    residuals = np.stack([cache["resid_post", i][0, -1] for i in layers])  # (L, C)
    logprobs = numbers.log_softmax(llm.logit_lens(residuals))  # (L, V)
    pairs = zip(logprobs.argmax(-1).tolist(), logprobs, strict=True)
    best = [{"token": names.name(i), "logprob": row[i].item()} for i, row in pairs]
    attention = np.stack([cache["pattern", i][0, :, -1] for i in layers])  # (L, H, T)
    return {"layers": best, "attention": attention.astype(np.float64).round(4).tolist()}


def activations_to_json(activations: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return each array as little-endian float32 in base64, with its shape."""
    found = {}
    for name, array in activations.items():
        data = base64.b64encode(np.asarray(array, "<f4").tobytes()).decode()
        found[name] = {"dtype": "float32", "shape": [*array.shape], "data": data}
    return found


def _edit(field: str, form: Any) -> Edit:
    values = {name: getattr(form, name) for name in form.model_fields_set}
    try:
        given = [name for name in ("keep", "value", "project_out") if values.get(name) is not None]
        return Edit(**values | {name: _array(values[name]) for name in given})
    except RequestError as error:
        raise error.named(f"{field}.{error.field}") from None
    except (ValueError, TypeError) as error:
        raise RequestError(f"has an array that cannot be read: {error}.", field) from None


def _array(given: Any) -> np.ndarray:
    """Raise ValueError or TypeError."""
    if isinstance(given, Array):
        data = base64.b64decode(given.data, validate=True)
        array = np.frombuffer(data, np.dtype(given.dtype).newbyteorder("<")).reshape(given.shape)
    else:
        array = np.array(given, np.float32)
    if not np.isfinite(array).all():
        raise ValueError("its numbers must be finite")
    return array
