"""Folders of PEFT's save_pretrained, and soft prompts of PEFT, NeMo and FasterTransformer: vectors that precede a text.

Prompt tuning (Lester et al., 2021) and p-tuning (Liu et al., 2021) train token embeddings; prefix tuning (Li and
Liang, 2021) trains the keys and values of every layer. The width of the tensor tells the two kinds apart.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ModelConfig
from ..containers.safetensors import read_safetensors
from ..errors import CheckpointError, describe, listed, shown
from ..files import ADAPTER_CONFIG as CONFIG
from ..files import ADAPTER_FILES, followed, looks_local, read_json_object, read_yaml_object
from ..tensor import STORED_AS, Container, MappedFile, StoredTensor

MODEL_CONFIG = "config.json"
# Of soft prompts, by peft_type.
KINDS = {"PROMPT_TUNING": "prompt", "P_TUNING": "prompt", "PREFIX_TUNING": "prefix"}
MAX_CONFIG = 2**18  # bytes: each regular expression takes time; GPT-2 1.5B's names are 6 000
MAX_NAME = 500  # characters of a tensor's name, whose parts are matched


@dataclass(frozen=True)
class AdapterFiles:
    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]
    files: tuple[Path, ...]


def read_adapter(folder: str | os.PathLike[str], peft_types: tuple[str, ...]) -> AdapterFiles:
    """Raise CheckpointError if a file is absent or damaged, or the adapter is of another type."""
    path = existing_path(folder)
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file: give the folder that holds it and {CONFIG}.")
    if not (path / CONFIG).exists():
        raise CheckpointError(f"{path} holds no {CONFIG}: give the folder that the adapter was saved into.")
    config = _read_config(path)
    if config.get("peft_type") not in peft_types:
        kind = shown(config.get("peft_type"))
        wanted = ", ".join(peft_types)
        raise CheckpointError(f"{path} is an adapter of the type {kind} and must be one of {wanted}.")
    file = next((path / name for name in ADAPTER_FILES if (path / name).exists()), None)
    if file is None:
        raise CheckpointError(
            f"{path} holds no weights ({describe(path)}); wanted is one of {', '.join(ADAPTER_FILES)}."
        )
    tensors = _read(file).tensors
    if (longest := max(map(len, tensors), default=0)) > MAX_NAME:
        raise CheckpointError(f"{file} names a tensor by {longest} characters, as no module is named.")
    return AdapterFiles(path, config, check_floating(file, tensors), (path / CONFIG, file))


def _read(file: Path) -> Container:
    if file.suffix == ".safetensors":
        return read_safetensors(file)
    from ..containers.torch import read_torch

    return read_torch(file)


def refuse_adapter(path: Path, folder: Path, model: str) -> None:
    """Raise CheckpointError if the folder, or a file in it, is an adapter."""
    is_meant = path == folder or path.name in (CONFIG, *ADAPTER_FILES)
    if not is_meant or (folder / MODEL_CONFIG).is_file():
        return
    config = _read_config(folder)
    kind = config.get("peft_type")
    base = config.get("base_model_name_or_path")
    place = {"LORA": "--lora", **dict.fromkeys(KINDS, "--soft-prompt")}.get(str(kind))
    use = f"{model} as {place}" if place else "no adapter, as such ones are not implemented"
    base = f", {shown(base)}," if base else ""
    raise CheckpointError(
        f"{model} is an adapter of the type {shown(kind)}, and no checkpoint: give the checkpoint that it was trained "
        f"for{base} as the model, and {use}."
    )


def _read_config(folder: Path) -> dict[str, Any]:
    if (folder / CONFIG).stat().st_size > MAX_CONFIG:
        raise CheckpointError(
            f"{folder / CONFIG} has more than {MAX_CONFIG} bytes, which no adapter needs: refused."
        )
    return read_json_object(folder / CONFIG)


def existing_path(adapter: str | os.PathLike[str]) -> Path:
    """Return the path, of a Hub adapter after its download. Raise CheckpointError if it does not exist."""
    if not isinstance(adapter, (str, os.PathLike)) or not str(adapter):
        raise CheckpointError(f"the adapter is {adapter!r} and must be the path of a folder.")
    try:
        path = Path(adapter).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError, ValueError) as error:  # no permission, a ~name without a home, a zero byte
        raise CheckpointError(f"{adapter} cannot be read: {error}.") from error
    if not isinstance(adapter, str) or "/" not in adapter or looks_local(adapter):
        raise CheckpointError(
            f"there is no {adapter}: check the path, or give a Hub id such as 'owner/adapter'."
        )
    from ..hub import download_adapter

    return download_adapter(adapter)


def check_floating(file: Path, tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    others = [f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if not tensor.is_floating]
    if others:
        raise CheckpointError(f"{file} must hold {', '.join(STORED_AS)} and nothing else: {listed(others)}.")
    return tensors


TENSOR = "prompt_embeddings"
# A task's table in NeMo's archive, and in the file that nemo_ckpt_convert.py of FasterTransformer makes of it.
NEMO_TABLE = re.compile(r"(?:.*/)?prompt_table\.prompt_table\.(.+)\.prompt_embeddings\.weight")
FT_TABLE = re.compile(r"model\.prompt_table\.(.+)\.weight\.bin")


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
        return self.keys.shape[2]


def read_soft_prompt(source: str | os.PathLike[str], config: ModelConfig, name: str = "") -> SoftPrompt:
    """Read PEFT's folder, a safetensors file of `prompt_embeddings` alone, a .nemo, or a model.prompt_table.*.bin.

    name: of the task, if a .nemo holds several.
    Raise CheckpointError if it cannot be read, is of another type or model, or leaves no position for a text.
    """
    path = existing_path(source)
    if table := FT_TABLE.fullmatch(path.name):
        return _soft_prompt(path, _ft_table(path, table[1], config), config)
    if path.suffix == ".nemo":
        return _soft_prompt(path, _nemo_table(path, name), config)
    files = read_adapter(path, tuple(KINDS)) if path.is_dir() else None
    tensors = files.tensors if files else check_floating(path, read_safetensors(followed(path)).tensors)
    if list(tensors) != [TENSOR]:
        raise CheckpointError(f"{path} must hold one tensor, {TENSOR}, and holds {listed(list(tensors))}.")
    prompt = _soft_prompt(path, tensors[TENSOR].float32(), config)
    if files:
        _check_config(files, prompt, config)
    return prompt


def _nemo_table(path: Path, task: str) -> np.ndarray:
    from ..containers.ranks import NEMO_CONFIG, read_nemo  # rarely needed, as all that reads pickles

    container = read_nemo(followed(path))
    matches = ((NEMO_TABLE.fullmatch(name), tensor) for name, tensor in container.tensors.items())
    tables = {match[1]: tensor for match, tensor in matches if match}
    task = next(iter(tables)) if len(tables) == 1 else task
    if task not in tables:
        raise CheckpointError(
            f"{path} holds prompts of {listed([*tables]) or 'no task'}: name the soft prompt so."
        )
    settings = read_yaml_object(f"{path}: {NEMO_CONFIG}", container.archive_members[NEMO_CONFIG].text())
    templates = [one for one in settings.get("task_templates") or () if isinstance(one, dict)]
    splits = next((one.get("virtual_token_splits") for one in templates if one.get("taskname") == task), None)
    if isinstance(splits, list) and len(splits) > 1:
        raise CheckpointError(
            f"{path} cuts {task} into {len(splits)} places of a text: all must stand before it."
        )
    return check_floating(path, {task: tables[task]})[task].float32()


def _ft_table(path: Path, task: str, config: ModelConfig) -> np.ndarray:
    """Return (P, C). The file has no dtype: config.ini's is the model's, and the prompt keeps the one of training."""
    from ..containers.ranks import ft_sections

    lengths = (
        one.get("prompt_length", "")
        for one in ft_sections(path.parent).values()
        if one.get("task_name") == task
    )
    length = next(lengths, "")
    file = MappedFile(followed(path))
    C = config.n_embd
    P = int(length) if re.fullmatch(r"[1-9]\d{0,8}", length) else 0
    dtype = {P * C * 4: "float32", P * C * 2: "float16"}.get(len(file)) if P else None
    if dtype is None:
        wanted = f"as many rows of {C} as its prompt_length in config.ini, in float32 or float16"
        raise CheckpointError(
            f"{path} has {len(file)} bytes, prompt_length is {length!r}, and it must hold {wanted}."
        )
    return StoredTensor(file, dtype, (P, C), (C, 1), 0).float32()


def _soft_prompt(path: Path, array: np.ndarray, config: ModelConfig) -> SoftPrompt:
    C = config.n_embd
    L = config.n_layer
    H = config.n_head
    D = config.head_size
    if array.ndim != 2 or array.shape[1] not in (C, 2 * L * C):
        widths = f"{C} (prompt tuning, p-tuning) or {2 * L * C} (prefix tuning)"
        raise CheckpointError(
            f"{path} holds {TENSOR} of shape {array.shape}, and this model's widths are {widths}."
        )
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
