"""Text and JSON in a tokenizer's files."""

import json
from pathlib import Path
from typing import Any

from tinygpt.errors import CheckpointError
from tinygpt.weights.files import how_to_replace, read_regular_text


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); {how_to_replace(path)}.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__} and must hold an object.")
    return content


def read_text(path: Path) -> str:
    """The UTF-8 text in a file, line ends as one newline each. Raises CheckpointError."""
    try:
        return read_regular_text(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 at byte {error.start}; {how_to_replace(path)}.") from None
