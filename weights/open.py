"""From the name that a user gives to the checkpoint; a Hub id goes through huggingface_hub."""

import os
from pathlib import Path

from tinygpt.weights.adapters.files import CONFIG as ADAPTER_CONFIG
from tinygpt.weights.adapters.files import refuse_adapter
from tinygpt.weights.checkpoint import Checkpoint, is_random, open_random
from tinygpt.weights.containers.mapped_file import FILES
from tinygpt.weights.errors import CheckpointError, describe, listed
from tinygpt.weights.files import CONFIG_FILES, PACKED_FILE, TENSOR_NAMES, TOKENIZER_FILES
from tinygpt.weights.stored.packed import PackedCheckpoint

DEMO = Path(__file__).resolve().parent / "demo"
# Of files of weights, and of no Hub id.
SUFFIXES = (".bin", ".ckpt", ".gguf", ".index", ".nemo", ".npz", ".onnx", ".pt", ".pth", ".safetensors")


def open_checkpoint(model: str | os.PathLike[str] = "demo") -> Checkpoint | PackedCheckpoint:
    """Open "demo", a local folder or file, converted or not, a Hub id, or "random:SHAPE".

    Raise one CheckpointError for all that is wrong.
    """
    if is_random(model):
        return open_random(str(model))
    path = resolve(model)
    if (path / PACKED_FILE).exists():
        return PackedCheckpoint.open(path)
    from tinygpt.weights.matching import read_checkpoint  # every format: a tenth of a converted checkpoint's start

    return read_checkpoint(path)


def resolve(model: str | os.PathLike[str]) -> Path:
    """Return the path of "demo", a local folder or file, or a Hub id, which is downloaded. Raise CheckpointError."""
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
    """Accept any case, and spaces around it, unless a folder has that name."""
    return model == "demo" or (str(model).strip().lower() == "demo" and not Path(model).is_dir())


def _local_path(model: str | os.PathLike[str]) -> Path | None:
    path, text = Path(model).expanduser(), str(model)
    if path.is_dir() or path.is_file():
        return path
    if path.exists():
        raise CheckpointError(f"{model} is a device, a pipe or a socket, and no checkpoint: give a folder or a file.")
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
    raise CheckpointError(
        f"{folder} is no checkpoint: it must hold config.json, {' or '.join(FILES)}, and the tokenizer's files, and "
        f"{describe(folder)}.{hint}"
    )


def download(repo_id: str) -> Path:
    """Return the local folder of a Hub checkpoint. Raise CheckpointError.

    Safetensors are preferred to pytorch_model.bin. Of an adapter, only the configuration is fetched.
    """
    from tinygpt.weights.containers.formats import INDEX, shard_of_each_tensor

    folder = Path()
    for name in FILES:
        folder = _fetch(repo_id, [*CONFIG_FILES, TENSOR_NAMES, ADAPTER_CONFIG, *TOKENIZER_FILES, name, name + INDEX])
        if (folder / name).exists():
            break
        if (folder / (name + INDEX)).exists():
            _fetch(repo_id, sorted(set(shard_of_each_tensor(folder / (name + INDEX)).values())))
            break
    if not any((folder / name).exists() for name in ("config.json", ADAPTER_CONFIG)):
        raise CheckpointError(f"{repo_id} on the Hub has no config.json: it is no checkpoint that can be loaded.")
    return folder


def _fetch(repo_id: str, names: list[str]) -> Path:
    import huggingface_hub  # slow to import, and only a Hub id needs it
    from huggingface_hub import constants, utils

    is_offline = constants.HF_HUB_OFFLINE
    cannot = "HF_HUB_OFFLINE forbids downloads" if is_offline else f"{constants.ENDPOINT} cannot be reached"
    log_in = "log in with `hf auth login`"
    reasons = {  # by classes of errors, the narrower ones first
        utils.HFValidationError: "is neither a local folder nor a Hub id such as 'openai-community/gpt2'",
        utils.GatedRepoError: f"on the Hub asks for consent to its terms: accept them there and {log_in}",
        utils.RepositoryNotFoundError: "is no local folder and there is no such model on the Hub, or it is private: "
        f"check the spelling, or {log_in}",
        utils.LocalEntryNotFoundError: f"is no local folder, and not wholly in the cache {constants.HF_HUB_CACHE}; "
        f"{cannot}",
    }
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=names))
    except Exception as error:  # the network library's own errors differ with huggingface_hub's version
        failed = f"cannot be downloaded from the Hub ({error}): try again"
        reason = next((text for kind, text in reasons.items() if isinstance(error, kind)), failed)
        raise CheckpointError(f"{repo_id!r} {reason}.") from error
