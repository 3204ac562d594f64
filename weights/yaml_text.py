"""YAML, as NeMo writes its settings, or a sentence on why it cannot be read."""

from typing import Any

from tinygpt.weights.errors import CheckpointError

MAX_CHARACTERS, MAX_DEPTH = 100_000, 100  # PyYAML takes time for each character, and the more the deeper it stands


def read_yaml_object(place: str, text: str) -> dict[str, Any]:
    """The mapping in a text; `place` is where it stood. CheckpointError where it is none, or refers to parts of itself:
    a few lines could stand for more than memory holds."""
    import yaml  # comes with huggingface_hub

    try:
        _check_size(place, text)
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{place} is not valid YAML ({str(error)[:200]}): download it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{place} must hold a mapping of names to values: download it again.")
    return value


def _check_size(place: str, text: str) -> None:
    from yaml import scan, tokens

    begins = (tokens.FlowSequenceStartToken, tokens.FlowMappingStartToken)
    begins += (tokens.BlockSequenceStartToken, tokens.BlockMappingStartToken)
    ends = (tokens.FlowSequenceEndToken, tokens.FlowMappingEndToken, tokens.BlockEndToken)
    if len(text) > MAX_CHARACTERS:
        raise CheckpointError(f"{place} has {len(text)} characters and may have {MAX_CHARACTERS}: leave texts out.")
    depth = 0
    for token in scan(text):
        depth += isinstance(token, begins) - isinstance(token, ends)
        if depth > MAX_DEPTH or isinstance(token, tokens.AliasToken):
            raise CheckpointError(f"{place} is deeper than settings are, or has aliases: write it anew without.")
