"""Weights in several files of one format, with an index that says which tensor is in which file."""

from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath

from tinygpt.weights.containers.container import Container, StoredTensor
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.json_file import read_json_object
from tinygpt.weights.messages import listed, shown

MAX_SHARDS = 1000  # of models that are a thousand times larger there are some two hundred
NAME_MAX = 255  # bytes in the name of a file, on the systems that there are
INDEX = ".index.json"  # what follows the name of the whole file


def read_shards(index: Path, read: Callable[[Path], Container]) -> Container:
    """All tensors of the shards that `index` names. CheckpointError when one is absent or not as the index says."""
    weight_map = shard_of_each_tensor(index)
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (index.parent / shard).exists()]
    if absent:
        raise CheckpointError(f"{index} names shards that are not there: {listed(absent)}. Download them.")
    names_in: dict[str, list[str]] = {shard: [] for shard in shards}
    for name, shard in weight_map.items():
        names_in[shard].append(name)
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        container = read(index.parent / shard)
        found = container.tensors
        lost = [name for name in names_in[shard] if name not in found]
        twice = [name for name in found if name in tensors]
        if lost or twice:
            what = [f"does not hold {listed(lost)}"] * bool(lost)
            what += [f"holds {listed(twice)}, as another shard does"] * bool(twice)
            raise CheckpointError(
                f"{index} does not describe its shards: {shard} {' and '.join(what)}. Download them all again."
            )
        tensors |= found
    return Container(f"{container.format} in {len(shards)} shards", tensors)


def shard_of_each_tensor(index: Path) -> dict[str, str]:
    """An index's `weight_map`. Raises CheckpointError unless it gives a plain file name for each tensor."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no 'weight_map' of tensor names to shards: download it again.")
    shards = list(weight_map.values())
    strange = [shard for shard in shards if not isinstance(shard, str) or not _is_plain_name(shard)]
    if strange:
        raise CheckpointError(
            f"{index} names the shard {shown(strange[0])}, which is no file name in its own folder: download the "
            "index again."
        )
    if len(set(shards)) > MAX_SHARDS:
        raise CheckpointError(f"{index} names {len(set(shards))} shards and at most {MAX_SHARDS} are believed.")
    return weight_map


def _is_plain_name(shard: str) -> bool:
    """Whether a name stands for one file: without folders, and without what the Hub or a shell takes for a pattern."""
    return (
        shard not in (".", "..")
        and shard.isprintable()
        and not set(shard) & set("*?[]")
        and PurePosixPath(shard).name == PureWindowsPath(shard).name == shard
        and 0 < len(shard.encode()) <= NAME_MAX
    )
