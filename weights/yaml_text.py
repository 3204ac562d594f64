"""YAML, as NeMo writes its settings, or a sentence on why it cannot be read."""

from typing import Any

from tinygpt.errors import CheckpointError

MAX_CHARACTERS = 1_000_000


def read_yaml_object(place: str, text: str) -> dict[str, Any]:
    """The mapping in a text; `place` is where it stood. CheckpointError where it is none, or refers to parts of itself:
    a few lines could stand for more than memory holds."""
    import yaml  # comes with huggingface_hub

    try:
        if len(text) > MAX_CHARACTERS or any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise CheckpointError(f"{place} is longer than settings are, or has aliases: write it anew without.")
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{place} is not valid YAML ({str(error)[:200]}): download it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{place} must hold a mapping of names to values: download it again.")
    return value
