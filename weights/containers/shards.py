"""Weights in several files of one format, with an index that says which tensor is in which file."""

from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath

from tinygpt.errors import CheckpointError
from tinygpt.weights.containers.container import Container, StoredTensor
from tinygpt.weights.json_file import read_json_object

INDEX = ".index.json"  # what follows the name of the whole file


def read_shards(index: Path, read: Callable[[Path], Container]) -> Container:
    """All tensors of the shards that `index` names. CheckpointError when one is absent or not as the index says."""
    weight_map = shard_of_each_tensor(index)
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (index.parent / shard).is_file()]
    if absent:
        raise CheckpointError(f"{index} names shards that are not there: {', '.join(absent)}. Download them.")
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        found = read(index.parent / shard).tensors
        lost = [name for name, home in weight_map.items() if home == shard and name not in found]
        twice = [name for name in found if name in tensors]
        if lost or twice:
            what = [f"does not hold {', '.join(lost)}"] * bool(lost)
            what += [f"holds {', '.join(twice)}, as another shard does"] * bool(twice)
            raise CheckpointError(
                f"{index} does not describe its shards: {shard} {' and '.join(what)}. Download them all again."
            )
        tensors |= found
    return Container(tensors)


def shard_of_each_tensor(index: Path) -> dict[str, str]:
    """An index's `weight_map`. Raises CheckpointError unless it gives a plain file name for each tensor."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no 'weight_map' of tensor names to shards: download it again.")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise CheckpointError(f"{index} names the shard {shard!r}, which is no file name in its own folder.")
    return weight_map


def _is_plain_name(shard: str) -> bool:
    return shard not in ("", ".", "..") and PurePosixPath(shard).name == PureWindowsPath(shard).name == shard
