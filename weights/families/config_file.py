"""config.json of a folder as a ModelConfig, of any model_type."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinygpt.weights.config import ModelConfig
from tinygpt.weights.families import gpt2
from tinygpt.weights.files import read_json_object


def read_config(folder: Path) -> ModelConfig:
    """Return the configuration of a folder. Raise CheckpointError, with all that is wrong, if it cannot be used."""
    generation = folder / "generation_config.json"
    fields = read_json_object(folder / "config.json")
    return model_config(fields, read_json_object(generation) if generation.exists() else None)


def model_config(fields: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    if gpt2.is_gpt2(fields):
        return gpt2.model_config(fields, generation)
    from tinygpt.weights.families.table import model_type_of  # all families: a twentieth of a start

    return model_type_of(fields).model_config(fields, generation)
