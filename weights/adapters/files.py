"""Folders of PEFT's save_pretrained: adapter_config.json and the trained tensors."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..containers.mapped_file import STORED_AS, Container, StoredTensor
from ..containers.safetensors import read_safetensors
from ..errors import CheckpointError, describe, listed, shown
from ..files import ADAPTER_CONFIG as CONFIG
from ..files import ADAPTER_FILES, looks_local, read_json_object

MODEL_CONFIG = "config.json"
SOFT_PROMPTS = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")
MAX_CONFIG = 2**18  # bytes: each regular expression takes time; GPT-2 1.5B's names are 6 000
MAX_NAME = 500  # characters of a tensor's name, whose parts are matched


@dataclass(frozen=True)
class AdapterFiles:
    """The fields of adapter_config.json, the tensors, and all files that were read."""

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
        given = shown(config.get("peft_type"))
        wanted = ", ".join(peft_types)
        raise CheckpointError(f"{path} is an adapter of the type {given} and must be one of {wanted}.")
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
    from ..containers.torch import read_torch  # rarely needed

    return read_torch(file)


def refuse_adapter(path: Path, given: str) -> None:
    """Raise CheckpointError if the folder or file is an adapter."""
    folder = path if path.is_dir() else path.parent
    is_meant = path.is_dir() or path.name in (CONFIG, *ADAPTER_FILES)
    if not (is_meant and (folder / CONFIG).is_file()) or (folder / MODEL_CONFIG).is_file():
        return
    config = _read_config(folder)
    kind = config.get("peft_type")
    base = config.get("base_model_name_or_path")
    place = {"LORA": "--lora", **dict.fromkeys(SOFT_PROMPTS, "--soft-prompt")}.get(str(kind))
    use = f"{given} as {place}" if place else "no adapter, as such ones are not implemented"
    base = f", {shown(base)}," if base else ""
    raise CheckpointError(
        f"{given} is an adapter of the type {shown(kind)}, and no checkpoint: give the checkpoint that it was trained "
        f"for{base} as the model, and {use}."
    )


def _read_config(folder: Path) -> dict[str, Any]:
    if (folder / CONFIG).stat().st_size > MAX_CONFIG:
        raise CheckpointError(
            f"{folder / CONFIG} has more than {MAX_CONFIG} bytes, which no adapter needs: refused."
        )
    return read_json_object(folder / CONFIG)


def existing_path(given: str | os.PathLike[str]) -> Path:
    """Return the path, of a Hub adapter after its download. Raise CheckpointError if it does not exist."""
    if not isinstance(given, (str, os.PathLike)) or not str(given):
        raise CheckpointError(f"the adapter is {given!r} and must be the path of a folder.")
    try:
        path = Path(given).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError, ValueError) as error:  # no permission, a ~name without a home, a zero byte
        raise CheckpointError(f"{given} cannot be read: {error}.") from error
    if not isinstance(given, str) or "/" not in given or looks_local(given):
        raise CheckpointError(
            f"there is no {given}: check the path, or give a Hub id such as 'owner/adapter'."
        )
    from ..hub import download_adapter  # rarely needed

    return download_adapter(given)


def check_floating(file: Path, tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    others = [f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if not tensor.is_floating]
    if others:
        raise CheckpointError(f"{file} must hold {', '.join(STORED_AS)} and nothing else: {listed(others)}.")
    return tensors
