"""Distance of logits and greedy tokens from transformers' or a golden file's."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, RequestError, how_to_install
from ..weights.files import read_json_object

FORMAT = "tinygpt golden 1"
# Dtype and number of dimensions of a golden's arrays in a file.
ARRAYS = {
    "token_ids": (np.int64, 1),
    "logits": (np.float32, 2),
    "greedy_ids": (np.int64, 1),
    "greedy_leads": (np.float64, 1),
    "hidden_states": (np.float32, 3),
}
TOP = 20


@dataclass(frozen=True)
class Golden:
    """Another engine's results for a prompt of T tokens, and greedy tokens after it."""

    token_ids: list[int]
    logits: np.ndarray  # (T, V) float32
    greedy_ids: list[int]
    greedy_leads: list[float]  # lead of the best logit over the second, for each of greedy_ids
    hidden_states: np.ndarray | None  # (L + 1, T, C) float32, as of LLM.hidden_states


@dataclass(frozen=True)
class Difference:
    largest: float
    mean: float


@dataclass(frozen=True)
class Divergence:
    """The first greedy token, `index` after the prompt, that differs."""

    prompt: int
    index: int
    token_id: int
    expected: int
    lead: float  # of the expected token's logit over the second


@dataclass(frozen=True)
class Parity:
    num_prompts: int
    num_positions: int
    num_greedy_tokens: int
    logits: Difference
    top_1: float  # share of positions with the same best token
    top_20: float  # mean share of the golden's TOP among ours
    divergences: list[Divergence]
    by_position: dict[int, Difference]  # by first position of a range
    by_layer: list[Difference] | None

    def failures(self, tolerance: float) -> list[str]:
        failures = []
        if not self.logits.largest <= tolerance:  # also for NaN
            failures.append(
                f"a logit differs by {self.logits.largest:.3g} and the tolerance is {tolerance:g}."
            )
        for at in self.divergences:
            if not at.lead <= 2 * tolerance:  # two logits within the tolerance may change places
                failures.append(
                    f"greedy token {at.index} after prompt {at.prompt} is {at.token_id} instead of {at.expected}, "
                    f"which led by {at.lead:.3g}."
                )
        return failures


def compute_goldens(
    path: Path, prompts: Sequence[list[int]], num_greedy: Sequence[int], threads: int, has_states: bool
) -> list[Golden]:
    """Compute with transformers in float32, num_greedy[i] tokens after prompt i. Raise RequestError without it."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, GPT2LMHeadModel
        from transformers.utils import logging
    except ImportError as error:
        install = f"{how_to_install('parity')}, or give --golden a file"
        raise RequestError(f"torch and transformers are needed ({error}): {install}.") from error
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    has_type = "model_type" in read_json_object(path / "config.json")  # GPT-2's first files have none
    model_class = AutoModelForCausalLM if has_type else GPT2LMHeadModel
    # Only eager attention takes reorder_and_upcast_attn.
    model, loading = model_class.from_pretrained(path, attn_implementation="eager", output_loading_info=True)
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:4])
        raise CheckpointError(
            f"transformers finds no {missing} in {path} and would initialize them at random."
        )
    model = model.float().eval()
    with torch.inference_mode():
        return [_compute(model, *pair, has_states) for pair in zip(prompts, num_greedy, strict=True)]


def _compute(model: Any, token_ids: list[int], num_greedy: int, has_states: bool) -> Golden:
    import torch

    # transformers' GPT-1 has none.
    has_cache = "past_key_values" in inspect.signature(model.forward).parameters
    cached = {"use_cache": True} if has_cache else {}
    output = model(torch.tensor([token_ids]), **cached, output_hidden_states=has_states)
    logits = output.logits[0].numpy()  # (T, V)
    states = torch.stack(output.hidden_states)[:, 0].numpy() if has_states else None  # (L + 1, T, C)
    greedy_ids, leads = [], []
    for _ in range(num_greedy):
        if greedy_ids and has_cache:
            last = torch.tensor([greedy_ids[-1:]])
            output = model(last, past_key_values=output.past_key_values, **cached)
        elif greedy_ids:
            output = model(torch.tensor([token_ids + greedy_ids]))
        best, ids = output.logits[0, -1].topk(2)
        greedy_ids.append(ids[0].item())
        leads.append((best[0] - best[1]).item())
    return Golden(token_ids, logits, greedy_ids, leads, states)


def save_goldens(path: Path, goldens: Sequence[Golden]) -> None:
    """Write an .npz file. Raise OSError if that fails."""
    arrays = {"format": np.array(FORMAT)}
    for i, golden in enumerate(goldens):
        for name, (dtype, _) in ARRAYS.items():
            if (values := getattr(golden, name)) is not None:
                arrays[f"{name}.{i}"] = np.array(values, dtype)
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def load_goldens(path: Path) -> list[Golden]:
    """Read a file of `save_goldens`. Raise RequestError for damage, OSError for no file."""
    with path.open("rb") as file:
        try:
            with np.load(file, allow_pickle=False) as arrays:
                if str(arrays["format"]) != FORMAT:
                    raise KeyError("format")
                return [
                    _golden(arrays, i)
                    for i in range(sum(name.startswith("token_ids.") for name in arrays.files))
                ]
        except Exception as error:  # of zipfile, zlib or NumPy; some are OSErrors
            raise RequestError(
                f"{path} is no file of --save-golden, or a damaged one: make it again."
            ) from error


def _golden(arrays: Mapping[str, Any], i: int) -> Golden:
    fields: dict[str, Any] = {"hidden_states": None}
    for name, (dtype, ndim) in ARRAYS.items():
        if name not in fields or f"{name}.{i}" in arrays:
            array = arrays[f"{name}.{i}"]  # bytes if the archive's entry is no array
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != ndim:
                raise ValueError(name)
            fields[name] = array.tolist() if ndim == 1 else array
    return Golden(**fields)


def compare(
    goldens: Sequence[Golden],
    logits: Sequence[np.ndarray],
    greedy_ids: Sequence[list[int]],
    hidden_states: Sequence[np.ndarray] | None = None,
) -> Parity:
    """Compare logits (T, V), greedy tokens and hidden states (L + 1, T, C) with each golden's."""
    pairs = [(golden.logits, ours) for golden, ours in zip(goldens, logits, strict=True)]
    gaps = [np.abs(ours - expected) for expected, ours in pairs]
    by_layer = None
    if hidden_states is not None:
        layers = [
            np.abs(golden.hidden_states - ours) for golden, ours in zip(goldens, hidden_states, strict=True)
        ]
        by_layer = [_difference([gap[layer] for gap in layers]) for layer in range(len(layers[0]))]
    return Parity(
        num_prompts=len(goldens),
        num_positions=sum(map(len, gaps)),
        num_greedy_tokens=sum(len(golden.greedy_ids) for golden in goldens),
        logits=_difference(gaps),
        top_1=float(
            np.concatenate([expected.argmax(-1) == ours.argmax(-1) for expected, ours in pairs]).mean()
        ),
        top_20=float(np.concatenate([_top_agreement(expected, ours) for expected, ours in pairs]).mean()),
        divergences=_divergences(goldens, greedy_ids),
        by_position=_by_position(gaps),
        by_layer=by_layer,
    )


def _difference(gaps: Sequence[np.ndarray]) -> Difference:
    total = sum(gap.sum(dtype=np.float64) for gap in gaps)
    return Difference(
        float(np.max([gap.max() for gap in gaps])), float(total / sum(gap.size for gap in gaps))
    )


def _top_agreement(expected: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """Return the share of the TOP tokens that is among our TOP, (T,)."""
    size = min(TOP, expected.shape[1])
    tops = [np.argsort(-logits, -1, kind="stable")[:, :size] for logits in (expected, ours)]  # (T, TOP) each
    return np.array([len(np.intersect1d(a, b)) / size for a, b in zip(*tops, strict=True)])


def _divergences(goldens: Sequence[Golden], greedy_ids: Sequence[list[int]]) -> list[Divergence]:
    divergences = []
    for prompt, (golden, ours) in enumerate(zip(goldens, greedy_ids, strict=True)):
        pairs = enumerate(zip(ours, golden.greedy_ids, strict=True))
        index = next((i for i, (token_id, expected) in pairs if token_id != expected), None)
        if index is not None:
            divergences.append(
                Divergence(prompt, index, ours[index], golden.greedy_ids[index], golden.greedy_leads[index])
            )
    return divergences


def _by_position(gaps: Sequence[np.ndarray]) -> dict[int, Difference]:
    """Group positions 0, 1, 2 to 3, 4 to 7 and so on."""
    longest = max(map(len, gaps))
    start = 0
    differences = {}
    while start < longest:
        stop = max(1, 2 * start)
        differences[start] = _difference([gap[start:stop] for gap in gaps if len(gap) > start])
        start = stop
    return differences
