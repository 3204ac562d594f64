"""Models and adapters of the Hugging Face Hub: their names, downloads and cache. Only here is the network used."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from .containers.formats import INDEX, shard_of_each_tensor
from .errors import CheckpointError, listed
from .files import ADAPTER_CONFIG, ADAPTER_FILES, CONFIG_FILES, SUFFIXES, TENSOR_NAMES, TOKENIZER_FILES
from .tensor import FILES

URL = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://")
# owner/name@revision/path:quant, or of a page, owner/name/tree/revision/path?query.
NAME = re.compile(
    r"(?P<repo_id>[\w.-]+(?:/(?!(?:tree|blob|resolve)/)[\w.-]+)?)(?:(?:@|/(?:tree|blob|resolve)/)"
    r"(?P<revision>refs/(?:pr|convert)/\w+|[^/:@?]+))?(?:/(?P<path>[^:@?]*?))?/?(?::(?P<quant>\w+))?(?:\?.*)?"
)


class HubName(NamedTuple):
    """A repository, with a revision, a folder or file in it, and a quantization such as q8_0 of a GGUF file."""

    repo_id: str
    revision: str | None = None
    path: str = ""
    quant: str = ""

    def __str__(self) -> str:
        parts = {"@": quote(self.revision or "", safe=""), "/": self.path, ":": self.quant}
        return self.repo_id + "".join(f"{mark}{part}" for mark, part in parts.items() if part)


def parse(text: str) -> HubName:
    """Raise CheckpointError."""
    url = URL.match(text)
    match = NAME.fullmatch(text[url.end() if url else 0 :])
    if match is None:
        raise CheckpointError(
            f"{text!r} is neither a local folder nor a Hub id such as 'openai-community/gpt2'."
        )
    revision = match["revision"] and unquote(match["revision"])  # a slash in it is %2F
    return HubName(match["repo_id"], revision, match["path"] or "", match["quant"] or "")


def download(text: str) -> Path:
    """Return the local folder or file of a checkpoint. Raise CheckpointError.

    Safetensors are preferred to pytorch_model.bin, and these to GGUF. Of an adapter, only the configuration is fetched.
    """
    name = parse(text)
    beside = [*CONFIG_FILES, TENSOR_NAMES, ADAPTER_CONFIG, *TOKENIZER_FILES]
    if name.path.lower().endswith(SUFFIXES):
        inside = name.path.rpartition("/")[0]
        beside = (
            []
            if name.path.lower().endswith(".gguf")
            else [f"{inside}/{small}".lstrip("/") for small in beside]
        )
        return _existing(name, [name.path, *beside])
    inside = name.path and f"{name.path}/"
    folder = Path()
    if name.quant:
        return _gguf(name)
    for file in FILES:
        folder = _fetch(name, [inside + wanted for wanted in (*beside, file, file + INDEX)]) / inside
        if (folder / file).exists():
            break
        if (folder / (file + INDEX)).exists():
            shards = sorted(set(shard_of_each_tensor(folder / (file + INDEX)).values()))
            _fetch(name, [inside + shard for shard in shards])
            break
    if any((folder / config).exists() for config in ("config.json", ADAPTER_CONFIG)):
        return folder
    return _gguf(name)


def download_adapter(text: str) -> Path:
    """Raise CheckpointError."""
    name = parse(text)
    files = (ADAPTER_CONFIG, *ADAPTER_FILES, *TOKENIZER_FILES)
    return _existing(name, [f"{name.path}/{file}".lstrip("/") for file in files])


def _existing(name: HubName, files: Iterable[str]) -> Path:
    path = _fetch(name, files) / name.path
    if not path.exists():
        raise CheckpointError(f"{name.repo_id} on the Hub has no {name.path}.")
    return path


def _gguf(name: HubName) -> Path:
    """Return the one GGUF file that the name may mean."""
    inside = name.path and f"{name.path}/"
    files = [file for file in _files(name) if file.lower().endswith(".gguf") and file.startswith(inside)]
    wanted = re.compile(rf"(?<![a-z0-9]){name.quant}(?![a-z0-9_])", re.IGNORECASE)
    fitting = [file for file in files if not name.quant or wanted.search(file)]
    if len(fitting) == 1:
        return _fetch(name, fitting) / fitting[0]
    listing = (
        f"it may mean {len(fitting)} of the GGUF files {listed(files)}: name one" if files else "no GGUF file"
    )
    raise CheckpointError(f"{name} on the Hub has no config.json, and {listing}.")


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
    models = []
    for repo in sorted((repo for repo in repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id):
        revisions = sorted({ref for at in repo.revisions for ref in (at.refs or {at.commit_hash})})
        models.append(
            {"id": repo.repo_id, "revisions": revisions, "size": repo.size_on_disk, "files": repo.nb_files}
        )
    return models


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
        utils.LocalEntryNotFoundError: "is no local folder, and not all of it is in the cache "
        f"{constants.HF_HUB_CACHE}: {_in_cache(name, Path(constants.HF_HUB_CACHE))}; {cannot}",
    }
    try:
        folder = huggingface_hub.snapshot_download(
            name.repo_id, revision=name.revision, allow_patterns=[*patterns]
        )
    except Exception as error:  # the network library's own errors differ with huggingface_hub's version
        failed = f"cannot be downloaded from the Hub ({error}): try again"
        reason = next((text for kind, text in reasons.items() if isinstance(error, kind)), failed)
        raise CheckpointError(f"{str(name)!r} {reason}.") from error
    return Path(folder)


def _in_cache(name: HubName, cache: Path) -> str:
    """Return advice on a model of which the cache lacks a revision, or files."""
    folder = cache / f"models--{name.repo_id.replace('/', '--')}"
    commits = sorted(path.name for path in folder.glob("snapshots/*"))
    return (
        f"it has {name.repo_id}@{listed(commits, 3)}, of which you may name one"
        if commits
        else "check the spelling"
    )
