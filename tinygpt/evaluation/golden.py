"""What an engine is compared with: another's logits and greedy tokens, just computed or kept in a file."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tinygpt.errors import CheckpointError, RequestError, how_to_install
from tinygpt.weights.files import read_json_object

FORMAT = "tinygpt golden 1"


@dataclass(frozen=True)
class Golden:
    """One prompt's. T tokens in the prompt, G made greedily after it, end-of-text or not."""

    token_ids: list[int]
    logits: np.ndarray  # (T, V) float32
    greedy_ids: list[int]
    greedy_leads: list[float]  # by how much the best logit led the second one, for each of greedy_ids
    hidden_states: np.ndarray | None  # (L + 1, T, C) float32, as LLM.hidden_states has them


def check_transformers() -> None:
    """RequestError where transformers or torch is not installed."""
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise _unusable(f"no {' and no '.join(missing)} here")


def _unusable(why: object) -> RequestError:
    return RequestError(
        f"torch and transformers are needed ({why}): {how_to_install('parity')}, or give --golden, a file that parity "
        "--save-golden has written where they are."
    )


def compute_goldens(
    path: Path, prompts: Sequence[list[int]], num_greedy: Sequence[int], threads: int, has_states: bool
) -> list[Golden]:
    """What transformers makes of each prompt in float32, with so many greedy tokens after it.

    Raises RequestError where transformers is not installed, CheckpointError where it does not know the tensors' names.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM, GPT2LMHeadModel
        from transformers.utils import logging
    except ImportError as error:
        raise _unusable(error) from error
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    has_type = "model_type" in read_json_object(path / "config.json")  # GPT-2's first files have none
    model_class = AutoModelForCausalLM if has_type else GPT2LMHeadModel
    # Eager attention is GPT-2's own, and the only one that takes reorder_and_upcast_attn.
    model, loading = model_class.from_pretrained(path, attn_implementation="eager", output_loading_info=True)
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:4])
        raise CheckpointError(
            f"transformers finds no {missing} in {path}, and would make them up: there is nothing to compare with."
        )
    model = model.float().eval()
    with torch.inference_mode():
        return [
            _compute(model, token_ids, count, has_states) for token_ids, count in zip(prompts, num_greedy, strict=True)
        ]


def _compute(model, token_ids: list[int], num_greedy: int, has_states: bool) -> Golden:
    import torch

    has_cache = "past_key_values" in inspect.signature(model.forward).parameters  # transformers' GPT-1 has none
    cached = {"use_cache": True} if has_cache else {}
    output = model(torch.tensor([token_ids]), **cached, output_hidden_states=has_states)
    logits = output.logits[0].numpy()
    states = torch.stack(output.hidden_states)[:, 0].numpy() if has_states else None
    greedy_ids, leads = [], []
    while True:
        best, ids = output.logits[0, -1].topk(2)
        if len(greedy_ids) == num_greedy:
            return Golden(token_ids, logits, greedy_ids, leads, states)
        greedy_ids.append(ids[0].item())
        leads.append((best[0] - best[1]).item())
        if len(greedy_ids) < num_greedy and has_cache:
            output = model(ids[:1].view(1, 1), past_key_values=output.past_key_values, **cached)
        elif len(greedy_ids) < num_greedy:
            output = model(torch.tensor([token_ids + greedy_ids]))


def save_goldens(path: Path, goldens: Sequence[Golden]) -> None:
    """Write an .npz file. OSError where that fails."""
    arrays = {"format": np.array(FORMAT)}
    for i, golden in enumerate(goldens):
        arrays[f"token_ids.{i}"] = np.array(golden.token_ids, np.int64)
        arrays[f"logits.{i}"] = golden.logits
        arrays[f"greedy_ids.{i}"] = np.array(golden.greedy_ids, np.int64)
        arrays[f"greedy_leads.{i}"] = np.array(golden.greedy_leads, np.float64)
        if golden.hidden_states is not None:
            arrays[f"hidden_states.{i}"] = golden.hidden_states
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def load_goldens(path: Path) -> list[Golden]:
    """Read what `save_goldens` wrote. RequestError where it did not write it; OSError where there is no such file."""
    with path.open("rb") as file:
        try:
            with np.load(file, allow_pickle=False) as arrays:
                if str(arrays["format"]) != FORMAT:
                    raise KeyError("format")
                count = sum(name.startswith("token_ids.") for name in arrays.files)
                return [_golden(arrays, i) for i in range(count)]
        # A damaged archive is many things to zipfile, zlib and NumPy, an OSError among them.
        except Exception as error:
            raise RequestError(
                f"{path} is no file that parity --save-golden has written, or a damaged one: make it again or name "
                "another."
            ) from error


def _golden(arrays: Mapping[str, Any], i: int) -> Golden:
    has_states = f"hidden_states.{i}" in arrays
    return Golden(
        _array(arrays, f"token_ids.{i}", np.int64, 1).tolist(),
        _array(arrays, f"logits.{i}", np.float32, 2),
        _array(arrays, f"greedy_ids.{i}", np.int64, 1).tolist(),
        _array(arrays, f"greedy_leads.{i}", np.float64, 1).tolist(),
        _array(arrays, f"hidden_states.{i}", np.float32, 3) if has_states else None,
    )


def _array(arrays: Mapping[str, Any], name: str, dtype: type, ndim: int) -> np.ndarray:
    array = arrays[name]  # bytes, where the archive's entry is no array
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != ndim:
        raise ValueError(name)
    return array
