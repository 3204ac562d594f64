"""Checkpoints from the Hugging Face Hub, through huggingface_hub: its cache, progress bars and offline switch."""

from pathlib import Path

from tinygpt.weights.containers.formats import INDEX, shard_of_each_tensor
from tinygpt.weights.containers.mapped_file import FILES
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.files import TOKENIZER_FILES

CONFIG_FILES = ("config.json", "generation_config.json")
ADAPTER_FILES = ("adapter_config.json",)  # they tell that the id is an adapter's


def download(repo_id: str) -> Path:
    """Return the local folder with the needed files of a Hub checkpoint, downloaded unless they are cached.

    Safetensors are preferred to pytorch_model.bin, and never are both fetched. Of an adapter, only the configuration
    is fetched. Raises CheckpointError if the id does not exist, access is denied, or the Hub cannot be reached.
    """
    folder = Path()
    for name in FILES:
        folder = _fetch(repo_id, [*CONFIG_FILES, *ADAPTER_FILES, *TOKENIZER_FILES, name, name + INDEX])
        if (folder / name).exists():
            break
        if (folder / (name + INDEX)).exists():
            _fetch(repo_id, sorted(set(shard_of_each_tensor(folder / (name + INDEX)).values())))
            break
    if not any((folder / name).exists() for name in ("config.json", *ADAPTER_FILES)):
        raise CheckpointError(
            f"{repo_id} on the Hub has no config.json, so it is no checkpoint that can be loaded: see what it holds at "
            f"{_page(repo_id)}/tree/main."
        )
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
            f"{repo_id} on the Hub asks for consent to its terms: accept them at {_page(repo_id)} and log in with "
            "`hf auth login`."
        ) from error
    except utils.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo_id!r} is no local folder and there is no such model on the Hub, or it is private: check the "
            f"spelling at {_page(repo_id)}, or log in with `hf auth login`."
        ) from error
    except utils.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise CheckpointError(
                f"{repo_id!r} is no local folder, and not wholly in the cache {constants.HF_HUB_CACHE}; HF_HUB_OFFLINE "
                "forbids downloads: check the path, or unset HF_HUB_OFFLINE."
            ) from error
        raise CheckpointError(
            f"{repo_id!r} is no local folder, it is not in the cache, and the Hub at {constants.ENDPOINT} cannot be "
            f"reached ({error.__cause__ or error}): check the network, or give a local folder."
        ) from error
    # The network library below differs with huggingface_hub's version, and so do its errors.
    except Exception as error:
        raise CheckpointError(f"downloading {repo_id} from the Hub failed ({error}): try again.") from error


def _page(repo_id: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo_id}"
