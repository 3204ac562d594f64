"""The one door: from the name that a user gives to the checkpoint."""

import os
from pathlib import Path

from tinygpt.errors import CheckpointError
from tinygpt.weights.checkpoint import Checkpoint, read_checkpoint
from tinygpt.weights.containers import CONTAINERS, describe
from tinygpt.weights.random_checkpoint import is_random, open_random
from tinygpt.weights.stored.packed import PACKED_FILE, PackedCheckpoint

NAMED = 3  # subfolders, in a message
FEW = 12  # files in a folder, that may all be named: /tmp holds more
DEMO = Path(__file__).resolve().parent / "demo"


def open_checkpoint(model: str | os.PathLike[str] = "demo") -> Checkpoint | PackedCheckpoint:
    """Open "demo", a local folder, converted or not, a Hub id, or "random:SHAPE".

    Raises CheckpointError, with everything that is wrong, when it cannot be found, read or used.
    """
    if is_random(model):
        return open_random(model)
    folder = resolve(model)
    return PackedCheckpoint.open(folder) if (folder / PACKED_FILE).exists() else read_checkpoint(folder)


def resolve(model: str | os.PathLike[str]) -> Path:
    """The folder of `model`: "demo" (the embedded checkpoint), a local folder, or a Hub id, which is downloaded.

    Raises CheckpointError when it is none of them, such as a random checkpoint, or the folder is no checkpoint.
    """
    if not isinstance(model, (str, os.PathLike)) or not str(model):
        raise CheckpointError(f"model is {model!r} and must be 'demo', a local folder or a Hub id.")
    if _is_demo(model):
        return DEMO
    if is_random(model):
        raise CheckpointError(f"{model} is drawn in memory and has no files: give a checkpoint that has.")
    try:
        folder = _local_folder(model)
        if folder is None:
            from tinygpt.weights.hub import download

            folder = download(str(model))
        _check_is_checkpoint(folder)
    except (OSError, RuntimeError) as error:  # no permission, a name too long, a ~name without a home
        raise CheckpointError(f"{model} cannot be read: {error}.") from error
    return folder


def _is_demo(model: str | os.PathLike[str]) -> bool:
    """Whether it is "demo", in capitals or with spaces around it too where no folder has that name."""
    return model == "demo" or (str(model).strip().lower() == "demo" and not Path(model).is_dir())


def _local_folder(model: str | os.PathLike[str]) -> Path | None:
    """The folder that `model` names, or None where it can only be a Hub id."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise CheckpointError(f"{model} is a file: give the folder that holds it and config.json.")
    if _is_meant_as_path(model):
        raise CheckpointError(f"There is no folder {model}: check the path, or give a Hub id such as 'gpt2'.")
    return None


def _is_meant_as_path(model: str | os.PathLike[str]) -> bool:
    """A Hub id is `name` or `owner/name`; whatever cannot be one was meant as a path."""
    text = str(model)
    return not isinstance(model, str) or text.startswith(("/", "./", "../", "~")) or text.count("/") > 1 or "\\" in text


def _check_is_checkpoint(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    weights = " or ".join(CONTAINERS)
    inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
    if len(inside) > NAMED:
        inside[NAMED:] = [f"{len(inside) - NAMED} more"]
    hint = f" Its subfolders {', '.join(inside)} look like checkpoints: give one of them." if inside else ""
    count = sum(1 for _ in folder.iterdir())
    held = describe(folder) if count <= FEW else f"of the {count} files and folders in it none is config.json"
    raise CheckpointError(
        f"{folder} is no checkpoint: it must hold config.json, {weights}, and the tokenizer's files, and {held}.{hint}"
    )
