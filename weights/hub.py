"""Models and adapters of the Hugging Face Hub: their names, downloads and cache. Only here is the network used."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinygpt.weights.containers.mapped_file import FILES
from tinygpt.weights.errors import CheckpointError, listed
from tinygpt.weights.files import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    CONFIG_FILES,
    SUFFIXES,
    TENSOR_NAMES,
    TOKENIZER_FILES,
)

URL = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://")
# owner/name@revision/path:quant, or of a page, owner/name/tree/revision/path?query.
NAME = re.compile(
    r"(?P<repo_id>[\w.-]+(?:/(?!(?:tree|blob|resolve)/)[\w.-]+)?)(?:(?:@|/(?:tree|blob|resolve)/)"
    r"(?P<revision>refs/(?:pr|convert)/\w+|[^/:@?]+))?(?:/(?P<path>[^:@?]*?))?/?(?::(?P<quant>\w+))?(?:\?.*)?"
)


@dataclass(frozen=True)
class HubName:
    """A repository, with a revision, a folder or file in it, and a quantization such as q8_0 of a GGUF file."""

    repo_id: str
    revision: str | None = None
    path: str | None = None
    quant: str | None = None

    def __str__(self) -> str:
        parts = {"@": self.revision, "/": self.path, ":": self.quant}
        return self.repo_id + "".join(f"{mark}{part}" for mark, part in parts.items() if part)


def parse(text: str) -> HubName:
    """Return the parts of a name or URL. Raise CheckpointError."""
    url = URL.match(text)
    match = NAME.fullmatch(text[url.end() if url else 0 :])
    if match is None:
        raise CheckpointError(f"{text!r} is neither a local folder nor a Hub id such as 'openai-community/gpt2'.")
    return HubName(**{name: part or None for name, part in match.groupdict().items()})


def download(text: str) -> Path:
    """Return the local folder or file of a checkpoint. Raise CheckpointError.

    Safetensors are preferred to pytorch_model.bin, and these to GGUF. Of an adapter, only the configuration is fetched.
    """
    from tinygpt.weights.containers.formats import INDEX, shard_of_each_tensor

    name = parse(text)
    if name.quant or (name.path or "").lower().endswith(".gguf"):
        return _gguf(name)
    is_file = name.path is not None and name.path.lower().endswith(SUFFIXES)
    place = name.path.rpartition("/")[0] if is_file else name.path
    inside = f"{place}/" if place else ""
    beside = [*CONFIG_FILES, TENSOR_NAMES, ADAPTER_CONFIG, *TOKENIZER_FILES]
    if is_file:
        return _existing(name, _fetch(name, [name.path, *(inside + each for each in beside)]) / name.path)
    folder = Path()
    for file in FILES:
        folder = _fetch(name, [inside + each for each in (*beside, file, file + INDEX)]) / inside
        if (folder / file).exists():
            break
        if (folder / (file + INDEX)).exists():
            shards = sorted(set(shard_of_each_tensor(folder / (file + INDEX)).values()))
            _fetch(name, [inside + shard for shard in shards])
            break
    if any((folder / each).exists() for each in ("config.json", ADAPTER_CONFIG)):
        return folder
    return _gguf(name)


def download_adapter(text: str) -> Path:
    """Return the local folder of a PEFT adapter. Raise CheckpointError."""
    name = parse(text)
    inside = f"{name.path}/" if name.path else ""
    return _existing(name, _fetch(name, [inside + file for file in (ADAPTER_CONFIG, *ADAPTER_FILES)]) / inside)


def _existing(name: HubName, path: Path) -> Path:
    if not path.exists():
        raise CheckpointError(f"{name.repo_id} on the Hub has no {name.path}.")
    return path


def _gguf(name: HubName) -> Path:
    """Return the one GGUF file that the name may mean."""
    if name.path and name.path.lower().endswith(".gguf"):
        return _existing(name, _fetch(name, [name.path]) / name.path)
    inside = f"{name.path}/" if name.path else ""
    files = [file for file in _files(name) if file.lower().endswith(".gguf") and file.startswith(inside)]
    wanted = re.compile(rf"(?<![a-z0-9]){name.quant}(?![a-z0-9_])", re.IGNORECASE)
    found = [file for file in files if not name.quant or wanted.search(file)]
    if len(found) == 1:
        return _fetch(name, found) / found[0]
    if not files:
        place = f" in {name.path}" if name.path else ""
        raise CheckpointError(f"{name.repo_id} on the Hub has no config.json{place} and no GGUF file: no checkpoint.")
    which = f"{len(found)} files of {name.quant!r}" if name.quant else f"{len(files)} GGUF files"
    raise CheckpointError(f"{name.repo_id} has {which} among {listed(files)}: give one, as {name.repo_id}/{files[0]}.")


def _files(name: HubName) -> Sequence[str]:
    """Return the names of the repository's files, or without a network of those in the cache."""
    import huggingface_hub

    try:
        return sorted(huggingface_hub.list_repo_files(name.repo_id, revision=name.revision))
    except Exception:  # `_fetch` raises the reason, unless there is no network
        folder = _fetch(name, ["config.json"])
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def cached_models() -> list[dict[str, Any]]:
    """Return the id, revisions, size in bytes and number of files of each model in the cache."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return [
        {
            "id": repo.repo_id,
            "revisions": sorted({ref for at in repo.revisions for ref in (at.refs or {at.commit_hash})}),
            "size": repo.size_on_disk,
            "files": repo.nb_files,
        }
        for repo in sorted(repos, key=lambda repo: repo.repo_id)
        if repo.repo_type == "model"
    ]


def _fetch(name: HubName, patterns: Iterable[str]) -> Path:
    """Return the local folder of the repository, with the files that are there."""
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
        utils.RevisionNotFoundError: f"on the Hub has no revision {name.revision!r}: give a commit, branch or tag",
        utils.LocalEntryNotFoundError: f"is no local folder, and not wholly in the cache {constants.HF_HUB_CACHE}; "
        f"{cannot}",
    }
    try:
        folder = huggingface_hub.snapshot_download(name.repo_id, revision=name.revision, allow_patterns=[*patterns])
    except Exception as error:  # the network library's own errors differ with huggingface_hub's version
        failed = f"cannot be downloaded from the Hub ({error}): try again"
        reason = next((text for kind, text in reasons.items() if isinstance(error, kind)), failed)
        raise CheckpointError(f"{name.repo_id!r} {reason}.") from error
    return Path(folder)
