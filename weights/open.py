"""From the name that a user gives to the checkpoint; a Hub id goes through huggingface_hub."""

import os
from difflib import get_close_matches
from pathlib import Path

from tinygpt.weights.adapters.files import refuse_adapter
from tinygpt.weights.checkpoint import Checkpoint, is_random, open_random
from tinygpt.weights.containers.mapped_file import FILES
from tinygpt.weights.errors import CheckpointError, describe, listed
from tinygpt.weights.files import CONFIG_FILES, PACKED_FILE, TOKENIZER_FILES
from tinygpt.weights.stored.packed import PackedCheckpoint

ADAPTER_FILES = ("adapter_config.json",)  # they tell that the id is an adapter's
FEW = 12  # files in a folder that may all be named: /tmp holds more
DEMO = Path(__file__).resolve().parent / "demo"
# Ends of names of weights; no Hub id that can be loaded has them.
SUFFIXES = (".bin", ".ckpt", ".gguf", ".index", ".nemo", ".npz", ".onnx", ".pt", ".pth", ".safetensors")


def open_checkpoint(model: str | os.PathLike[str] = "demo") -> Checkpoint | PackedCheckpoint:
    """Open "demo", a local folder or file, converted or not, a Hub id, or "random:SHAPE".

    Raise CheckpointError, with everything that is wrong, if it cannot be found, read or used.
    """
    if is_random(model):
        return open_random(str(model))
    path = resolve(model)
    if (path / PACKED_FILE).exists():
        return PackedCheckpoint.open(path)
    from tinygpt.weights.matching import read_checkpoint  # every format: a tenth of a converted checkpoint's start

    return read_checkpoint(path)


def resolve(model: str | os.PathLike[str]) -> Path:
    """Return the path of `model`: "demo", a local folder or file, or a Hub id, which is downloaded.

    Raise CheckpointError for anything else, such as a random checkpoint or a folder that is no checkpoint.
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
            path = download(str(model))
        refuse_adapter(path, str(model))
        _check_is_checkpoint(path)
    except (OSError, RuntimeError) as error:  # no permission, a name too long, a ~name without a home
        raise CheckpointError(f"{model} cannot be read: {error}.") from error
    return path.parent if path.name == PACKED_FILE else path


def _is_demo(model: str | os.PathLike[str]) -> bool:
    """Return whether the name is "demo", in any case, with spaces around it too, unless a folder has that name."""
    return model == "demo" or (str(model).strip().lower() == "demo" and not Path(model).is_dir())


def _local_path(model: str | os.PathLike[str]) -> Path | None:
    path, text = Path(model).expanduser(), str(model)
    if path.is_dir() or path.is_file():
        return path
    name = text.strip(" ./").lower()
    if "/" not in name and get_close_matches(name, ["demo"], cutoff=0.7):
        raise CheckpointError(
            f"there is no folder or file {model}: did you mean demo? A model of the Hub is given with its owner, as "
            f"OWNER/{name}."
        )
    if path.exists():
        raise CheckpointError(
            f"{model} is a device, a pipe or a socket, and no checkpoint: give a folder, a file of weights, or a Hub "
            "id such as 'gpt2'."
        )
    is_local = text.startswith(("/", "./", "../", "~")) or text.lower().endswith(SUFFIXES)
    if not isinstance(model, str) or is_local or text.count("/") > 1 or "\\" in text:
        raise CheckpointError(f"there is no folder or file {model}: check the path, or give a Hub id such as 'gpt2'.")
    return None


def _check_is_checkpoint(folder: Path) -> None:
    if folder.is_file() or (folder / "config.json").is_file():
        return
    from tinygpt.weights.containers.formats import find_weights

    if find_weights(folder):
        return
    inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
    hint = f" Its subfolders {listed(inside, 3)} look like checkpoints: give one of them." if inside else ""
    count = sum(1 for _ in folder.iterdir())
    held = describe(folder) if count <= FEW else f"of the {count} files and folders in it none is config.json"
    raise CheckpointError(
        f"{folder} is no checkpoint: it must hold config.json, {' or '.join(FILES)}, and the tokenizer's files, and "
        f"{held}.{hint}"
    )


def download(repo_id: str) -> Path:
    """Return the local folder with the needed files of a Hub checkpoint, downloaded unless they are cached.

    Safetensors are preferred to pytorch_model.bin, and never are both fetched. Of an adapter, only the configuration
    is fetched. Raises CheckpointError if the id does not exist, access is denied, or the Hub cannot be reached.
    """
    from tinygpt.weights.containers.formats import INDEX, shard_of_each_tensor

    folder = Path()
    for name in FILES:
        folder = _fetch(repo_id, [*CONFIG_FILES, *ADAPTER_FILES, *TOKENIZER_FILES, name, name + INDEX])
        if (folder / name).exists():
            break
        if (folder / (name + INDEX)).exists():
            _fetch(repo_id, sorted(set(shard_of_each_tensor(folder / (name + INDEX)).values())))
            break
    if not any((folder / name).exists() for name in ("config.json", *ADAPTER_FILES)):
        raise CheckpointError(f"{repo_id} on the Hub has no config.json: it is no checkpoint that can be loaded.")
    return folder


def _fetch(repo_id: str, names: list[str]) -> Path:
    import huggingface_hub  # slow to import, and only a Hub id needs it
    from huggingface_hub import constants, utils

    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=names))
    except utils.HFValidationError as error:
        raise CheckpointError(
            f"{repo_id!r} is neither a local folder nor a Hub id such as 'openai-community/gpt2': give one of them."
        ) from error
    except utils.GatedRepoError as error:
        raise CheckpointError(
            f"{repo_id} on the Hub asks for consent to its terms: accept them there and log in with `hf auth login`."
        ) from error
    except utils.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo_id!r} is no local folder and there is no such model on the Hub, or it is private: check the "
            "spelling, or log in with `hf auth login`."
        ) from error
    except utils.LocalEntryNotFoundError as error:
        reason = (
            "HF_HUB_OFFLINE forbids downloads"
            if constants.HF_HUB_OFFLINE
            else f"{constants.ENDPOINT} cannot be reached"
        )
        raise CheckpointError(
            f"{repo_id!r} is no local folder, and not wholly in the cache {constants.HF_HUB_CACHE}; {reason}."
        ) from error
    # The network library below differs with huggingface_hub's version, and so do its errors.
    except Exception as error:
        raise CheckpointError(f"downloading {repo_id} from the Hub failed ({error}): try again.") from error
