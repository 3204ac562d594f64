"""DeepSpeed's folders of a model with experts: what all experts share for each rank, and a file for each expert."""

import re
from pathlib import Path

from tinygpt.weights.containers.container import Container
from tinygpt.weights.containers.pickles.torch_file import read_training_checkpoint
from tinygpt.weights.containers.ranks.megatron_folder import megatron_files
from tinygpt.weights.containers.ranks.rank_files import Member, joined, rank_folders
from tinygpt.weights.errors import CheckpointError

# What all experts share, in a folder for each rank or beside one another, and the experts' own.
FOLDER_FILE = "model_states.pt"
RANK_FILE = re.compile(r"(mp_rank_\d{2,3})_model_states\.pt")
EXPERT_FILE = re.compile(r"layer_(\d{1,4})_expert_(\d{1,5})_(mp_rank_\d{2,3})_model_states\.pt")
PIPELINE_FILE = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
MAX_EXPERT_FILES = 16_384


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
    shared = joined("DeepSpeed", {rank: Member(file) for rank, file in _deepspeed_files(folder).items()}, {})
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
    files = {match[1]: path for path in folder.glob("mp_rank_*") if (match := RANK_FILE.fullmatch(path.name))}
    for rank in rank_folders(folder):
        if (rank / FOLDER_FILE).is_file():
            files[rank.name] = rank / FOLDER_FILE
    if files and any(PIPELINE_FILE.fullmatch(path.name) for path in folder.glob("layer_*")):
        raise CheckpointError(
            f"{folder} holds a file for each layer of a pipeline, which is not implemented: save it without one."
        )
    has_experts = any(EXPERT_FILE.fullmatch(path.name) for path in folder.glob("layer_*_expert_*"))
    if has_experts and not files:  # beside Megatron's own names
        files = {rank: path for rank, path in megatron_files(folder).items() if path.is_file()}
    return dict(sorted(files.items()))
