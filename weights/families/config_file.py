"""From a config.json to the model's configuration, of whatever model_type."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinygpt.weights.config import ModelConfig
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.families.hugging_face import gpt2
from tinygpt.weights.json_file import read_json_object


def read_config(folder: Path) -> ModelConfig:
    """What a folder's config.json says, and generation_config.json where there is one. CheckpointError if it cannot be
    used, with all that is wrong."""
    generation = folder / "generation_config.json"
    fields = read_json_object(folder / "config.json")
    return model_config(fields, read_json_object(generation) if generation.exists() else None)


def model_config(fields: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """ModelConfig from the fields of config.json and, where there is one, generation_config.json."""
    if gpt2.is_gpt2(fields):
        return gpt2.model_config(fields, generation)
    from tinygpt.weights.families.table import MODEL_TYPES, unknown_type  # all families, a twentieth of a start

    known = next((one for name, one in MODEL_TYPES.items() if name == fields.get("model_type")), None)
    if known is None:
        raise CheckpointError(unknown_type(fields))
    return known.model_config(fields, generation)
