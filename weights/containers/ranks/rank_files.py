"""Checkpoints in a file for each GPU that a model was trained on: Megatron-LM's folders, DeepSpeed's with a file for
each expert, and NeMo's archives.

The tensors of each file stand under the name of its rank, such as "mp_rank_01/model.embedding.weight", and so do the
metadata, by rank. A file alone has no rank.
"""

import os
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tinygpt.errors import CheckpointError
from tinygpt.regular_file import open_regular, read_regular_text
from tinygpt.weights.containers.container import Container
from tinygpt.weights.containers.peek import Peek
from tinygpt.weights.containers.pickles.torch_file import read_training_checkpoint

# What folders of ranks are called: tensor parallel, then pipeline parallel where there is any.
RANK = re.compile(r"mp_rank_(\d{2,3})(?:_(\d{3}))?|tp_rank_(\d{2,3})_pp_rank_(\d{3})")
DISTRIBUTED = ("*.distcp", "*/.zarray")  # what lies in folders of Megatron core's own formats
MEGATRON_FILES = ("model_optim_rng.pt", "model_rng.pt")
# DeepSpeed's: what all experts share, in a folder for each rank or beside one another, and the experts' own.
DEEPSPEED_FOLDER_FILE = "model_states.pt"
DEEPSPEED_FILE = re.compile(r"(mp_rank_\d{2,3})_model_states\.pt")
EXPERT_FILE = re.compile(r"layer_(\d{1,4})_expert_(\d{1,5})_(mp_rank_\d{2,3})_model_states\.pt")
PIPELINE_FILE = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
TRACKER = "latest_checkpointed_iteration.txt"
OLD_TORCH = {"sys_info", "pickle", "tensors", "storages"}  # members of such an archive
NEMO_CONFIG, NEMO_WEIGHTS = "model_config.yaml", "model_weights.ckpt"
MAX_RANKS, MAX_MEMBERS, MAX_TEXT = 1024, 10_000, 2**25  # files, members of an archive, bytes of a text in it
MAX_EXPERT_FILES = 16_384


@dataclass(frozen=True)
class Member:
    """A file that lies in an archive, or in the folder that one was unpacked into (`part` is None)."""

    path: Path
    part: range | None = None

    def text(self) -> str:
        """Raises CheckpointError where it is too long for a text, or none."""
        try:
            if self.part is None:
                return read_regular_text(self.path)
            if len(self.part) > MAX_TEXT:
                raise CheckpointError(f"{self.path} has a text of {len(self.part)} bytes, which is none.")
            with open_regular(self.path) as file:
                file.seek(self.part.start)
                return file.read(len(self.part)).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{self.path} has a text that cannot be read: {error}.") from error


class _Bounded:
    """A file for tarfile, which reads as many bytes as a header claims: never more than there are."""

    def __init__(self, file: BinaryIO):
        self._file, self._size = file, os.fstat(file.fileno()).st_size
        self.seek, self.tell = file.seek, file.tell

    def read(self, count: int) -> bytes:
        return self._file.read(min(count, self._size))


class _ByRank(dict):
    """Metadata by rank. No file can pretend to be of this class."""


class _Members(dict):
    """What else lies in an archive, by name."""


def metadata_by_rank(container: Container) -> dict[str, Any]:
    """Of a container of any kind: one that has no ranks is one."""
    ranks = container.metadata.get("ranks")
    return ranks if isinstance(ranks, _ByRank) else {"": container.metadata}


def members_of(container: Container) -> dict[str, Member]:
    """Of NeMo's archives, what else lies in them."""
    members = container.metadata.get("members")
    return members if isinstance(members, _Members) else {}


# Megatron-LM


def find_megatron(folder: Path) -> Path | None:
    """The folder with the ranks of the latest iteration, if that is what a folder holds."""
    if (folder / TRACKER).is_file():
        iteration = Member(folder / TRACKER).text().strip()
        name = f"iter_{int(iteration):07}" if iteration.isdecimal() and len(iteration) < 10 else iteration
        if (name != "release" and not name.startswith("iter_")) or not (folder / name).is_dir():
            raise CheckpointError(f"{folder / TRACKER} names no folder beside it: give the folder of an iteration.")
        folder = folder / name
    return folder if any((rank / name).is_file() for rank in _rank_folders(folder) for name in MEGATRON_FILES) else None


def read_megatron(folder: Path) -> Container:
    """All ranks. CheckpointError when a file is damaged."""
    files = {
        rank.name: next((rank / name for name in MEGATRON_FILES if (rank / name).is_file()), rank / MEGATRON_FILES[0])
        for rank in _rank_folders(folder)
    }
    return _joined("Megatron-LM", {rank: Member(file) for rank, file in files.items()}, {})


def find_distributed(folder: Path) -> Path | None:
    """The folder, or the one of its parts that is in Megatron core's distributed format."""
    tracked = sorted(folder.glob("iter_*")) if (folder / TRACKER).is_file() else []
    places = (folder, *tracked, folder / "weights", folder / "model_weights")  # those of NeMo 2, and of late NeMo 1
    return next((place for place in places for pattern in DISTRIBUTED if any(place.glob(pattern))), None)


def read_distributed(folder: Path) -> Container:
    raise CheckpointError(
        f"{folder} is in a distributed format, as Megatron core and NeMo 2 write it, which is not implemented: save it "
        "with Megatron's --ckpt-format torch, or export it to Hugging Face's layout."
    )


def _rank_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*_rank_*") if RANK.fullmatch(path.name) and path.is_dir())


# DeepSpeed


def find_deepspeed(folder: Path) -> Path | None:
    """The folder, or the latest of those in it, where that is what DeepSpeed writes of a model with experts."""
    if (folder / "latest").is_file():
        name = Member(folder / "latest").text().strip()
        if not re.fullmatch(r"[\w-]{1,200}", name) or not (folder / name).is_dir():
            raise CheckpointError(f"{folder / 'latest'} names no folder beside it: give the folder of a step.")
        folder = folder / name
    return folder if _deepspeed_files(folder) else None


def read_deepspeed(folder: Path) -> Container:
    """All ranks; an expert's tensors stand under "experts.LAYER.EXPERT." in its rank, where LAYER counts those that
    have experts. CheckpointError when a file is damaged."""
    shared = _joined("DeepSpeed", {rank: Member(file) for rank, file in _deepspeed_files(folder).items()}, {})
    found = [(match, path) for path in sorted(folder.iterdir()) if (match := EXPERT_FILE.fullmatch(path.name))]
    if len(found) > MAX_EXPERT_FILES:
        raise CheckpointError(f"{len(found)} files of experts are more than {MAX_EXPERT_FILES}, which any model has.")
    tensors = dict(shared.tensors)
    for match, path in found:
        layer, expert, rank = int(match[1]), int(match[2]), match[3]
        for name, tensor in read_training_checkpoint(path).tensors.items():
            tensors[f"{rank}/experts.{layer}.{expert}.{name}"] = tensor
    return Container(shared.format, tensors, shared.metadata)


def _deepspeed_files(folder: Path) -> dict[str, Path]:
    files = {match[1]: path for path in folder.glob("mp_rank_*") if (match := DEEPSPEED_FILE.fullmatch(path.name))}
    for rank in _rank_folders(folder):
        if (rank / DEEPSPEED_FOLDER_FILE).is_file():
            files[rank.name] = rank / DEEPSPEED_FOLDER_FILE
    if files and any(PIPELINE_FILE.fullmatch(path.name) for path in folder.glob("layer_*")):
        raise CheckpointError(
            f"{folder} holds a file for each layer of a pipeline, which is not implemented: save it without one."
        )
    has_experts = any(EXPERT_FILE.fullmatch(path.name) for path in folder.glob("layer_*_expert_*"))
    if has_experts and not files:  # beside Megatron's own names
        files = {rank.name: rank / name for rank in _rank_folders(folder) for name in MEGATRON_FILES}
        files = {rank: path for rank, path in files.items() if path.is_file()}
    return dict(sorted(files.items()))


# NeMo


def is_tar(peek: Peek) -> bool:
    return peek.head[257:262] == b"ustar"


def is_gzip(peek: Peek) -> bool:
    return peek.head.startswith(b"\x1f\x8b")


def read_gzip(path: Path) -> Container:
    raise CheckpointError(f"{path} is compressed: unpack it with `tar -xzf`, and give the folder.")


def read_nemo(path: Path) -> Container:
    """A .nemo archive, whose members are read where they lie. CheckpointError when it is damaged or another archive."""
    members = {}
    try:
        with open_regular(path) as file, tarfile.open(fileobj=_Bounded(file), mode="r:") as archive:
            for count, info in enumerate(archive):
                name = info.name.removeprefix("./")
                if count >= MAX_MEMBERS or name in members or not (info.isreg() or info.isdir()):
                    raise CheckpointError(
                        f"{path} has a member {info.name!r} that is a link, or a second one: refused."
                    )
                if info.isreg() and not info.issparse():
                    members[name] = Member(path, range(info.offset_data, info.offset_data + info.size))
    except (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is a damaged archive ({error}): download it again.") from error
    return _nemo(path, members)


def find_nemo(folder: Path) -> Path | None:
    """A folder that a .nemo archive was unpacked into."""
    is_there = (folder / NEMO_CONFIG).is_file() and _unpacked(folder).keys() - {NEMO_CONFIG}
    return folder if is_there else None


def read_unpacked_nemo(folder: Path) -> Container:
    return _nemo(folder, _unpacked(folder))


def _unpacked(folder: Path) -> dict[str, Member]:
    ranks = [path / NEMO_WEIGHTS for path in _rank_folders(folder) if (path / NEMO_WEIGHTS).is_file()]
    files = [path for path in folder.glob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): Member(path) for path in (*files, *ranks)}


def _nemo(path: Path, members: dict[str, Member]) -> Container:
    if members.keys() >= OLD_TORCH:
        raise CheckpointError(
            f"{path} is in the form that PyTorch wrote before 0.1.10, which is not implemented: load it with torch, "
            "and save it again."
        )
    if NEMO_CONFIG not in members:
        raise CheckpointError(f"{path} is an archive without {NEMO_CONFIG}: it is not NeMo's. Give another file.")
    if any(name.startswith("model_weights/") for name in members):
        raise CheckpointError(f"{path} is in NeMo's distributed format, which is not implemented: save it in one file.")
    weights = {name.rpartition("/")[0]: member for name, member in members.items() if name.endswith(NEMO_WEIGHTS)}
    others = {name: member for name, member in members.items() if not name.endswith(NEMO_WEIGHTS)}
    if not weights:
        raise CheckpointError(f"{path} holds no {NEMO_WEIGHTS}: download it again.")
    return _joined("NeMo", weights, {"members": _Members(others)})


def _joined(format: str, files: dict[str, Member], metadata: dict[str, Any]) -> Container:
    """The files by their ranks; "" is a file without."""
    if len(files) > MAX_RANKS:
        raise CheckpointError(f"{len(files)} ranks are more than any model was trained on.")
    tensors, by_rank = {}, {}
    for rank, file in files.items():
        container = read_training_checkpoint(file.path, file.part)
        tensors |= {f"{rank}/{name}" if rank else name: tensor for name, tensor in container.tensors.items()}
        by_rank[rank] = container.metadata
    return Container(
        f"{format}, {len(files)} ranks" if len(files) > 1 else format, tensors, {**metadata, "ranks": _ByRank(by_rank)}
    )
