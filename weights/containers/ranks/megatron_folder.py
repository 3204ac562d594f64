"""Megatron-LM's folders: a folder for each rank, in that of an iteration, which a tracker names."""

from pathlib import Path

from tinygpt.weights.containers.container import Container
from tinygpt.weights.containers.ranks.rank_files import Member, joined, rank_folders
from tinygpt.weights.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
MEGATRON_FILES = ("model_optim_rng.pt", "model_rng.pt")
DISTRIBUTED = ("*.distcp", "*/.zarray")  # what lies in folders of Megatron core's own formats


def find_megatron(folder: Path) -> Path | None:
    """The folder with the ranks of the latest iteration, if that is what a folder holds."""
    if (folder / TRACKER).is_file():
        iteration = Member(folder / TRACKER).text().strip()
        name = f"iter_{int(iteration):07}" if iteration.isdecimal() and len(iteration) < 10 else iteration
        if (name != "release" and not name.startswith("iter_")) or not (folder / name).is_dir():
            raise CheckpointError(f"{folder / TRACKER} names no folder beside it: give the folder of an iteration.")
        folder = folder / name
    return folder if any(file.is_file() for file in megatron_files(folder).values()) else None


def read_megatron(folder: Path) -> Container:
    """All ranks. CheckpointError when a file is damaged."""
    return joined("Megatron-LM", {rank: Member(file) for rank, file in megatron_files(folder).items()}, {})


def megatron_files(folder: Path) -> dict[str, Path]:
    """The file of each rank, whether it is there or not."""
    return {
        rank.name: next((rank / name for name in MEGATRON_FILES if (rank / name).is_file()), rank / MEGATRON_FILES[0])
        for rank in rank_folders(folder)
    }


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
