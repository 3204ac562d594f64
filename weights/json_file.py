"""JSON files of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from tinygpt.converted import how_to_replace
from tinygpt.regular_file import read_regular_text
from tinygpt.weights.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError when it is absent, damaged or not an object."""
    try:
        value = json.loads(read_regular_text(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} holds no {path.name}: copy it there from the model.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): {how_to_replace(path)}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__} and must hold an object {{...}}.")
    return value
