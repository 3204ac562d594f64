"""TensorFlow's tensor bundles, byte for byte as its Saver writes them, without TensorFlow."""

import struct
from collections.abc import Mapping
from pathlib import Path

import google_crc32c
import numpy as np

DTYPES = {
    "float32": 1,
    "float64": 2,
    "int32": 3,
    "int64": 9,
    "uint16": 14,
    "float16": 19,
}  # uint16: bfloat16's bits


def masked_checksum(data: bytes) -> bytes:
    checksum = google_crc32c.value(data)
    return struct.pack("<I", ((checksum >> 15 | checksum << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF)


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out = out + bytes([value & 127 | 128])
        value = value >> 7
    return out + bytes([value])


def field(number: int, value: int | bytes) -> bytes:
    """Of a message: a number, or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def entry(array: np.ndarray, offset: int, data: bytes, shard: int = 0) -> bytes:
    shape = b"".join(field(2, field(1, size)) for size in array.shape)
    place = (field(3, shard) if shard else b"") + (field(4, offset) if offset else b"")
    kind = field(1, DTYPES[array.dtype.name]) + field(2, shape)
    return kind + place + field(5, len(data)) + varint(6 << 3 | 5) + masked_checksum(data)


def block(records: list[tuple[bytes, bytes]], interval: int) -> bytes:
    """Keys share what they begin with, but for every `interval`-th."""
    out = b""
    last = b""
    restarts = []
    for i, (key, value) in enumerate(records):
        shared = 0
        if i % interval == 0:
            restarts.append(len(out))
        else:
            while shared < min(len(key), len(last)) and key[shared] == last[shared]:
                shared += 1
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    restarts = restarts or [0]
    return out + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def successor(key: bytes) -> bytes:
    """The shortest that is greater, as LevelDB chooses it."""
    return bytes([key[0] + 1]) if key and key[0] < 255 else key + b"\0"


def table(records: list[tuple[bytes, bytes]], per_block: int = 10**6, restart: int = 16) -> bytes:
    out = b""

    def put(content: bytes) -> bytes:
        nonlocal out
        handle = varint(len(out)) + varint(len(content))
        out += content + b"\0" + masked_checksum(content + b"\0")
        return handle

    parts = [records[i : i + per_block] for i in range(0, len(records), per_block)]
    handles = [put(block(part, restart)) for part in parts]
    statistics = put(block([], 16))
    separators = [part[-1][0] + b"\0" for part in parts[:-1]] + [successor(parts[-1][-1][0])]
    index = put(block(list(zip(separators, handles, strict=True)), 1))
    return out + (statistics + index).ljust(40, b"\0") + bytes.fromhex("57fb808b247547db")


def write_bundle(
    prefix: Path, arrays: Mapping[str, np.ndarray], num_shards: int = 1, per_block: int = 10**6
) -> Path:
    """The path of the index."""
    header = field(1, num_shards) + field(3, field(1, 1))
    records = [(b"", header)]
    data = [b""] * num_shards
    for i, name in enumerate(sorted(arrays)):
        raw = arrays[name].tobytes()
        shard = i % num_shards
        records.append((name.encode(), entry(arrays[name], len(data[shard]), raw, shard)))
        data[shard] += raw
    for shard, content in enumerate(data):
        prefix.with_name(f"{prefix.name}.data-{shard:05}-of-{num_shards:05}").write_bytes(content)
    index = prefix.with_name(f"{prefix.name}.index")
    index.write_bytes(table(records, per_block))
    return index
