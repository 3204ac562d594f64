"""Configuration and tokenizer next to the weights of a folder that `convert` makes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.errors import CheckpointError, NoTokenizerError
from tinygpt.weights.families.config_file import read_config
from tinygpt.weights.families.table import comes_with_config
from tinygpt.weights.files import TOKENIZER_FILES, read_json_object
from tinygpt.weights.hub import CONFIG_FILES
from tinygpt.weights.stored.export import layout_of


def write_sidecar_files(folder: Path, checkpoint: Checkpoint) -> None:
    """Copy the checkpoint's files if it has them in Hugging Face's form; otherwise write them."""
    # A head that differs from the embedding counts, whatever the checkpoint's own file says.
    config = replace(checkpoint.config, tie_word_embeddings=checkpoint.tied)
    try:
        is_as_beside = read_config(checkpoint.folder) == config
    except CheckpointError:
        is_as_beside = False
    if is_as_beside or comes_with_config(checkpoint.family):
        _copy(CONFIG_FILES, checkpoint.folder, folder)
        if not is_as_beside:
            fields = read_json_object(folder / "config.json")
            _write(folder / "config.json", {**fields, "tie_word_embeddings": config.tie_word_embeddings})
    else:
        config_json = layout_of(checkpoint).config_json
        assert config_json is not None  # of families that come without a config.json
        _write(folder / "config.json", config_json(config))
    try:
        spec = checkpoint.read_tokenizer()
    except NoTokenizerError:  # token ids work without it, there as here
        spec = None
    if spec is None:
        _copy(TOKENIZER_FILES, checkpoint.folder, folder)
    else:
        _write(folder / "tokenizer.json", {name: part for name, part in spec.items() if name != "eos_token"})
        if "eos_token" in spec:
            _write(folder / "tokenizer_config.json", {"eos_token": spec["eos_token"]})


def _copy(names: tuple[str, ...], source: Path, target: Path) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
