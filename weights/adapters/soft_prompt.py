"""Soft prompts in PEFT's layout: trained vectors that precede a text.

Prompt tuning (Lester et al., 2021) and p-tuning (Liu et al., 2021) train token embeddings; prefix tuning (Li and
Liang, 2021) trains the keys and values of every layer. The width of the tensor tells the two kinds apart.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinygpt.weights.adapters.files import SOFT_PROMPTS, AdapterFiles, check_floating, existing_path, read_adapter
from tinygpt.weights.config import ModelConfig
from tinygpt.weights.containers.safetensors import read_safetensors
from tinygpt.weights.errors import CheckpointError, listed
from tinygpt.weights.files import followed

KINDS = dict(zip(SOFT_PROMPTS, ("prompt", "prompt", "prefix"), strict=True))
TENSOR = "prompt_embeddings"


@dataclass(frozen=True)
class SoftPrompt:
    """P virtual tokens, at positions 0 to P - 1; the text begins at position P.

    kind "prompt": `embeds` (P, C) float32 replace rows of wte, and wpe is added to them.
    kind "prefix": `keys` and `values` (L, H, P, D) float32 are the cache's for these positions.
    """

    kind: str
    embeds: np.ndarray | None = None
    keys: np.ndarray | None = None
    values: np.ndarray | None = None

    def __len__(self) -> int:
        if self.embeds is not None:
            return len(self.embeds)
        assert self.keys is not None
        return self.keys.shape[2]


def read_soft_prompt(source: str | os.PathLike[str], config: ModelConfig) -> SoftPrompt:
    """Read a folder that PEFT wrote, or a safetensors file that holds `prompt_embeddings` alone.

    Raise CheckpointError if it cannot be read, is of another type or model, or leaves no position for a text.
    """
    path = existing_path(source)
    files = read_adapter(path, tuple(KINDS)) if path.is_dir() else None
    tensors = files.tensors if files else check_floating(path, read_safetensors(followed(path)).tensors)
    if list(tensors) != [TENSOR]:
        raise CheckpointError(f"{path} must hold one tensor, {TENSOR}, and holds {listed(list(tensors))}.")
    prompt = _soft_prompt(path, tensors[TENSOR].float32(), config)
    if files:
        _check_config(files, prompt, config)
    return prompt


def _soft_prompt(path: Path, array: np.ndarray, config: ModelConfig) -> SoftPrompt:
    C, L, H, D = config.n_embd, config.n_layer, config.n_head, config.head_size
    if array.ndim != 2 or array.shape[1] not in (C, 2 * L * C):
        widths = f"{C} (prompt tuning, p-tuning) or {2 * L * C} (prefix tuning)"
        raise CheckpointError(f"{path} holds {TENSOR} of shape {array.shape}, and this model's widths are {widths}.")
    P = len(array)
    if not 0 < P < config.n_positions:
        raise CheckpointError(
            f"{path} holds {P} virtual tokens, and this model takes from 1 to {config.n_positions - 1}: a text needs "
            f"one of its {config.n_positions} positions."
        )
    if array.shape[1] == C:
        return SoftPrompt("prompt", embeds=array.copy())
    layers = array.reshape(P, L, 2, H, D).transpose(2, 1, 3, 0, 4)  # (2, L, H, P, D)
    keys, values = np.ascontiguousarray(layers)  # (L, H, P, D)
    return SoftPrompt("prefix", keys=keys, values=values)


def _check_config(files: AdapterFiles, prompt: SoftPrompt, config: ModelConfig) -> None:
    wanted = {
        "peft_type": [name for name, kind in KINDS.items() if kind == prompt.kind],
        "num_virtual_tokens": [len(prompt)],
        "token_dim": [config.n_embd],
        "num_layers": [config.n_layer],
        "num_attention_heads": [config.n_head],
        "num_transformer_submodules": [1],
    }
    problems = [
        f"{name} is {files.config[name]!r} and should be {' or '.join(map(str, allowed))}"
        for name, allowed in wanted.items()
        if files.config.get(name) is not None and files.config[name] not in allowed
    ]
    if problems:
        raise CheckpointError(f"adapter_config.json of {files.path} does not fit: {'; '.join(problems)}.")
