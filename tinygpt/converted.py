"""How to tell a folder that `convert` has made from one that was downloaded."""

from pathlib import Path

PACKED_FILE = "model.tinygpt.safetensors"
PREPARED_FILE = "tokenizer.tinygpt"


def how_to_replace(path: Path, what: str = "it") -> str:
    """What to do about damaged files of a checkpoint, for the end of a sentence. path: of one, or of the folder."""
    folder = path if path.is_dir() else path.parent
    if any((folder / name).exists() for name in (PACKED_FILE, PREPARED_FILE)):
        return "convert the original checkpoint again"
    return f"download {what} again"
