"""From the name that a user gives to the checkpoint; `hub` downloads those of the Hub."""

import os
from pathlib import Path

from .checkpoint import Checkpoint, is_random, open_packed, open_random
from .containers.formats import find_weights
from .errors import CheckpointError, describe, listed
from .files import ADAPTER_CONFIG, PACKED_FILE, looks_local
from .tensor import FILES

DEMO = Path(__file__).resolve().parent / "demo"


def open_checkpoint(model: str | os.PathLike[str] = "demo") -> Checkpoint:
    """Open "demo", a local folder or file, converted or not, a Hub name, or "random:SHAPE".

    Raise one CheckpointError for all that is wrong.
    """
    if is_random(model):
        return open_random(str(model))
    path = resolve(model)
    if (path / PACKED_FILE).exists():
        return open_packed(path)
    from .matching import read_checkpoint

    return read_checkpoint(path)


def resolve(model: str | os.PathLike[str]) -> Path:
    """Return the path of "demo", a local folder or file, or of a Hub model, which is downloaded. Raise CheckpointError.

    A Hub model is an id such as "gpt2", id@revision, id/folder, id/file.gguf, id:q8_0, or one of these as a URL.
    """
    if not isinstance(model, (str, os.PathLike)) or not str(model):
        raise CheckpointError(f"model is {model!r} and must be 'demo', a local folder or file, or a Hub id.")
    if _is_demo(model):
        return DEMO
    if is_random(model):
        raise CheckpointError(f"{model} is drawn in memory and has no files: give a checkpoint that has.")
    try:
        path = _local_path(model)
        if path is None:
            from .hub import download

            path = download(str(model))
        folder = path if path.is_dir() else path.parent
        if (folder / ADAPTER_CONFIG).is_file():
            from .adapters.peft import refuse_adapter

            refuse_adapter(path, folder, str(model))
        _check_is_checkpoint(path)
    except (OSError, RuntimeError) as error:  # no permission, a name too long, a ~name without a home
        raise CheckpointError(f"{model} cannot be read: {error}.") from error
    return path.parent if path.name == PACKED_FILE else path


def with_revision(model: str, revision: str) -> str:
    """Return the name of a revision of a Hub model. Raise CheckpointError for another model, or a second revision."""
    from .hub import parse

    if not isinstance(revision, str) or not revision:
        raise CheckpointError(f"revision is {revision!r} and must be the name of a commit, branch or tag.")
    if not is_on_hub(model) or parse(model).revision is not None:
        raise CheckpointError(
            f"revision is {revision!r} and the model is {model}: a Hub model has one revision."
        )
    return str(parse(model)._replace(revision=revision))


def is_on_hub(model: str | os.PathLike[str]) -> bool:
    """Return whether the network is asked for the model. Raise CheckpointError for a local path that is not there."""
    return not (_is_demo(model) or is_random(model)) and _local_path(model) is None


def _is_demo(model: str | os.PathLike[str]) -> bool:
    """Accept any case, and spaces around it, unless a folder has that name."""
    return model == "demo" or (str(model).strip().lower() == "demo" and not Path(model).is_dir())


def _local_path(model: str | os.PathLike[str]) -> Path | None:
    path, text = Path(model).expanduser(), str(model)
    if path.is_dir() or path.is_file():
        return path
    if path.exists():
        raise CheckpointError(
            f"{model} is a device, a pipe or a socket, and no checkpoint: give a folder or a file."
        )
    if not isinstance(model, str) or looks_local(text):
        raise CheckpointError(
            f"there is no folder or file {model}: check the path, or give a Hub id such as 'gpt2'."
        )
    return None


def _check_is_checkpoint(folder: Path) -> None:
    if folder.is_file() or (folder / "config.json").is_file():
        return
    if find_weights(folder):
        return
    configs = (path.parent for depth in ("*", "snapshots/*") for path in folder.glob(f"{depth}/config.json"))
    inside = sorted(path.relative_to(folder).as_posix() for path in configs)
    hint = f" Its subfolders {listed(inside, 3)} look like checkpoints: give one of them." if inside else ""
    raise CheckpointError(
        f"{folder} is no checkpoint: it must hold config.json, {' or '.join(FILES)}, and the tokenizer's files, and "
        f"{describe(folder)}.{hint}"
    )
