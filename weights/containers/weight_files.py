"""The files of a checkpoint folder that hold its weights: safetensors or pytorch_model.bin, whole or in shards."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from tinygpt.errors import CheckpointError
from tinygpt.weights.containers.mapped_file import StoredTensor
from tinygpt.weights.containers.safetensors_file import read_safetensors
from tinygpt.weights.containers.torch_file import read_torch
from tinygpt.weights.json_file import read_json_object


@dataclass(frozen=True)
class WeightFormat:
    """A file form: the name of the whole file, of the index of its shards, and its reader."""

    whole: str
    index: str
    read: Callable[[Path], dict[str, StoredTensor]]


# In the order in which transformers looks for them.
FORMATS = (
    WeightFormat("model.safetensors", "model.safetensors.index.json", read_safetensors),
    WeightFormat("pytorch_model.bin", "pytorch_model.bin.index.json", read_torch),
)


def read_weights(folder: Path) -> dict[str, StoredTensor]:
    """Where every tensor of a checkpoint lies, by the name it has in the files.

    Raises CheckpointError when there is no weight file, a file is damaged, or an index does not tell the truth.
    """
    for form in FORMATS:
        if (folder / form.whole).exists():
            return form.read(folder / form.whole)
        if (folder / form.index).exists():
            return _read_shards(folder / form.index, form)
    raise CheckpointError(
        f"{folder} holds no weights ({describe(folder)}); wanted is one of "
        f"{', '.join(name for form in FORMATS for name in (form.whole, form.index))}."
    )


def shard_of_each_tensor(index: Path) -> dict[str, str]:
    """`weight_map` of an index. Raises CheckpointError when it is not file names by tensor name."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no 'weight_map' of tensor names to shards: download it again.")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise CheckpointError(f"{index} names the shard {shard!r}, which is no file name in its own folder.")
    return weight_map


def describe(folder: Path) -> str:
    """What a folder holds, in a few words."""
    names = sorted(path.name + "/" * path.is_dir() for path in folder.glob("*"))
    if not names:
        return "it is empty"
    return "it holds " + ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _read_shards(index: Path, form: WeightFormat) -> dict[str, StoredTensor]:
    weight_map = shard_of_each_tensor(index)
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (index.parent / shard).is_file()]
    if absent:
        raise CheckpointError(f"{index} names shards that are not there: {', '.join(absent)}. Download them.")
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        found = form.read(index.parent / shard)
        _check_shard(index, shard, found, tensors, weight_map)
        tensors |= found
    return tensors


def _check_shard(
    index: Path,
    shard: str,
    found: dict[str, StoredTensor],
    earlier: dict[str, StoredTensor],
    weight_map: dict[str, str],
) -> None:
    lost = [name for name, home in weight_map.items() if home == shard and name not in found]
    twice = [name for name in found if name in earlier]
    if lost or twice:
        what = [f"does not hold {', '.join(lost)}"] * bool(lost)
        what += [f"holds {', '.join(twice)}, as another shard does"] * bool(twice)
        raise CheckpointError(
            f"{index} does not describe its shards: {shard} {' and '.join(what)}. Download them all again."
        )


def _is_plain_name(shard: str) -> bool:
    return shard not in ("", ".", "..") and PurePosixPath(shard).name == PureWindowsPath(shard).name == shard
