"""Folders of several files: torch files of Megatron-LM's, DeepSpeed's and NeMo's GPUs, and FasterTransformer's tensors.

Tensors of torch files stand under the name of their rank, such as "mp_rank_01/model.embedding.weight". A file alone has
the rank "".
"""

import configparser
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, shown
from ..files import check_inside, open_regular, read_regular_text
from ..tensor import ITEMSIZE, Container, MappedFile, StoredTensor, parsing
from .torch import read_training_checkpoint

# Folders of ranks: tensor parallel, then pipeline parallel if there is any.
RANK = re.compile(r"mp_rank_(\d{2,3})(?:_(\d{3}))?|tp_rank_(\d{2,3})_pp_rank_(\d{3})")
# Files that name the folder of the latest iteration.
MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
DEEPSPEED_TRACKER = "latest"
MEGATRON_FILES = ("model_optim_rng.pt", "model_rng.pt")
# DeepSpeed: tensors of all experts, in a folder for each rank or in a file for each, and the experts' own files.
SHARED_FILE = "model_states.pt"
SHARED_RANK_FILE = re.compile(r"(mp_rank_\d{2,3})_model_states\.pt")
EXPERT_FILE = re.compile(r"layer_(\d{1,4})_expert_(\d{1,5})_(mp_rank_\d{2,3})_model_states\.pt")
PIPELINE_FILE = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
NEMO_CONFIG = "model_config.yaml"
NEMO_WEIGHTS = "model_weights.ckpt"
TAR_FIELD = re.compile(rb"\d{1,7} (path|size)=([^\n]*)\n")  # of an extended header


@dataclass(frozen=True)
class Member:
    """A file in a folder, or the `part` of an archive."""

    path: Path
    part: range | None = None

    def text(self) -> str:
        with parsing(self.path, "text"):
            if self.part is None:
                return read_regular_text(self.path)
            with open_regular(self.path, is_weights=True) as file:
                file.seek(self.part.start)
                return file.read(len(self.part)).decode()


def number_of(value: Any) -> Any:
    """Return the number that a setting's text is, as YAML takes 1e-5 for a text, or other values as they are."""
    for kind in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):
            return kind(value)
    return value


def rank_folders(folder: Path) -> list[Path]:
    """Raise CheckpointError for a link out of the folder."""
    folders = sorted(path for path in folder.glob("*_rank_*") if RANK.fullmatch(path.name) and path.is_dir())
    for path in folders:
        with parsing(path, "folder"):
            check_inside(path, folder)
    return folders


def joined(format: str, files: Mapping[str, Member], others: Mapping[str, Member]) -> Container:
    """Return the tensors of all ranks' files as one container. others: the other members of an archive."""
    tensors, by_rank = {}, {}
    for rank, file in files.items():
        container = read_training_checkpoint(file.path, file.part)
        tensors |= {f"{rank}/{name}" if rank else name: tensor for name, tensor in container.tensors.items()}
        by_rank[rank] = container.metadata
    name = f"{format}, {len(files)} ranks" if len(files) > 1 else format
    return Container(name, tensors, archive_members=others, rank_metadata=by_rank)


def latest(folder: Path, tracker: str) -> Path:
    """Return the folder that a file in the folder names, or the folder itself if there is no such file."""
    if not (folder / tracker).is_file():
        return folder
    name = Member(folder / tracker).text().strip()
    if tracker == MEGATRON_TRACKER and name.isdecimal() and len(name) < 10:
        name = f"iter_{int(name):07}"
    if not re.fullmatch(r"[\w-]{1,200}", name) or not (folder / name).is_dir():
        raise CheckpointError(
            f"{folder / tracker} names no folder beside it: give the folder of an iteration."
        )
    with parsing(folder / name, "folder"):
        check_inside(folder / name, folder)
    return folder / name


def find_megatron(folder: Path) -> Path | None:
    folder = latest(folder, MEGATRON_TRACKER)
    return folder if any(file.is_file() for file in _megatron_files(folder).values()) else None


def read_megatron(folder: Path) -> Container:
    return joined("Megatron-LM", {rank: Member(file) for rank, file in _megatron_files(folder).items()}, {})


def _megatron_files(folder: Path) -> dict[str, Path]:
    return {
        rank.name: next(
            (rank / name for name in MEGATRON_FILES if (rank / name).is_file()), rank / MEGATRON_FILES[0]
        )
        for rank in rank_folders(folder)
    }


def find_deepspeed(folder: Path) -> Path | None:
    folder = latest(folder, DEEPSPEED_TRACKER)
    return folder if _deepspeed_files(folder) else None


def read_deepspeed(folder: Path) -> Container:
    """Return all tensors, an expert's under "experts.LAYER.EXPERT." in its rank; LAYER counts layers with experts."""
    shared = joined("DeepSpeed", {rank: Member(file) for rank, file in _deepspeed_files(folder).items()}, {})
    tensors = dict(shared.tensors)
    for path in sorted(folder.iterdir()):
        match = EXPERT_FILE.fullmatch(path.name)
        if match is None:
            continue
        layer = int(match[1])
        expert = int(match[2])
        rank = match[3]
        for name, tensor in read_training_checkpoint(path).tensors.items():
            tensors[f"{rank}/experts.{layer}.{expert}.{name}"] = tensor
    return Container(shared.format, tensors, rank_metadata=shared.rank_metadata)


def _deepspeed_files(folder: Path) -> dict[str, Path]:
    files = {
        match[1]: path
        for path in folder.glob("mp_rank_*")
        if (match := SHARED_RANK_FILE.fullmatch(path.name))
    }
    files |= {
        rank.name: rank / SHARED_FILE for rank in rank_folders(folder) if (rank / SHARED_FILE).is_file()
    }
    if files and any(PIPELINE_FILE.fullmatch(path.name) for path in folder.glob("layer_*")):
        raise CheckpointError(
            f"{folder} holds a file for each layer of a pipeline, which is not implemented: save it without one."
        )
    has_experts = any(EXPERT_FILE.fullmatch(path.name) for path in folder.glob("layer_*_expert_*"))
    if has_experts and not files:  # next to Megatron's own names
        files = {rank: path for rank, path in _megatron_files(folder).items() if path.is_file()}
    return dict(sorted(files.items()))


def read_nemo(path: Path) -> Container:
    members: dict[str, Member] = {}
    with parsing(path, "archive", tarfile.TarError):
        for kind, name, data in _tar_members(MappedFile(path)):
            name = name.removeprefix("./")
            if name in members or kind not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
                raise CheckpointError(
                    f"{path} has a member {name!r} that is a link, or a second one: refused."
                )
            if kind != tarfile.DIRTYPE:
                members[name] = Member(path, data)
    return _nemo(path, members)


def _tar_members(file: MappedFile) -> Iterator[tuple[bytes, str, range]]:
    """Yield type, name and place. tarfile takes time and memory in the square of an extended header's size."""
    place, extended = 0, {}
    while any(block := file.data[place : place + tarfile.BLOCKSIZE]):
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        size = int(extended.get(b"size", info.size))
        start = place + tarfile.BLOCKSIZE
        data = range(start, start + size)
        if size < 0 or data.stop > len(file):
            raise ValueError(f"a member of {size} bytes reaches outside it")
        place = data.stop + -size % tarfile.BLOCKSIZE
        if info.type == tarfile.XHDTYPE:
            extended = {field[1]: field[2] for field in TAR_FIELD.finditer(file.data, start, data.stop)}
        elif info.type == tarfile.GNUTYPE_LONGNAME:
            extended = {b"path": file.data[start : data.stop].rstrip(b"\0")}
        elif info.type != tarfile.XGLTYPE:
            name = extended.get(b"path", info.name.encode("utf-8", "surrogateescape"))
            yield info.type, name.decode("utf-8", "surrogateescape").rstrip("/"), data
            extended = {}


def find_nemo(folder: Path) -> Path | None:
    return folder if (folder / NEMO_CONFIG).is_file() else None


def read_unpacked_nemo(folder: Path) -> Container:
    ranks = [path / NEMO_WEIGHTS for path in rank_folders(folder) if (path / NEMO_WEIGHTS).is_file()]
    files = [path for path in folder.glob("*") if path.is_file()]
    return _nemo(folder, {path.relative_to(folder).as_posix(): Member(path) for path in (*files, *ranks)})


def _nemo(path: Path, members: dict[str, Member]) -> Container:
    if NEMO_CONFIG not in members:
        raise CheckpointError(
            f"{path} is an archive without {NEMO_CONFIG}: it is not NeMo's. Give another file."
        )
    weights = {
        name.rpartition("/")[0]: member for name, member in members.items() if name.endswith(NEMO_WEIGHTS)
    }
    others = {name: member for name, member in members.items() if not name.endswith(NEMO_WEIGHTS)}
    if not weights:
        raise CheckpointError(f"{path} holds no {NEMO_WEIGHTS}: download it again.")
    return joined("NeMo", weights, others)


# FasterTransformer: config.ini, and for each tensor a file of numbers. The names of parts end in the number of a GPU.

FT_CONFIG = "config.ini"
FT_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# Characters: configparser takes time in the square of a line's.
MAX_INI, MAX_INI_LINE = 100_000, 1000


def find_ft_folder(folder: Path) -> Path | None:
    """Raise CheckpointError for tensors without their configuration."""
    if not any(folder.glob("model.wte*.bin")):
        return None
    if not (folder / FT_CONFIG).is_file():
        raise CheckpointError(
            f"{folder} holds FasterTransformer's tensors without their {FT_CONFIG}: copy it there, or, under its name, "
            "the gpt_config.ini that the model ran with."
        )
    return folder


def ft_sections(folder: Path) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(inline_comment_prefixes=";")
    with parsing(folder / FT_CONFIG, "configuration", configparser.Error):
        text = read_regular_text(folder / FT_CONFIG)
        if len(text) > MAX_INI or max(map(len, text.split("\n"))) > MAX_INI_LINE:
            raise ValueError(f"it has more than {MAX_INI} characters, or {MAX_INI_LINE} in a line")
        parser.read_string(text)
    return {name: dict(parser[name]) for name in parser.sections()}


def read_ft_folder(folder: Path) -> Container:
    """Return tensors of one dimension and, as metadata, the sections of config.ini."""
    sections = ft_sections(folder)
    type_name = next(
        (section["weight_data_type"] for section in sections.values() if "weight_data_type" in section),
        "fp32",
    )
    if type_name not in FT_DTYPES:
        raise CheckpointError(
            f"{folder / FT_CONFIG}: weight_data_type is {shown(type_name)} and must be one of {', '.join(FT_DTYPES)}."
        )
    dtype, tensors = FT_DTYPES[type_name], {}
    for path in sorted(folder.glob("model.*.bin")):
        file = MappedFile(path)
        count, rest = divmod(len(file), ITEMSIZE[dtype])
        if rest:
            raise CheckpointError(
                f"{path} has {len(file)} bytes, which are no whole {dtype} numbers: copy it again."
            )
        tensors[path.stem] = StoredTensor(file, dtype, (count,), (1,), 0)
    return Container("FasterTransformer folder", tensors, sections)
