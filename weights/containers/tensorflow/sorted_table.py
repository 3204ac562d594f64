"""A table of keys and values in LevelDB's form, as TensorFlow writes it: blocks of records, each with a CRC-32C.

Format: https://github.com/google/leveldb/blob/main/doc/table_format.md
"""

from collections.abc import Iterator

from tinygpt.weights.containers.protobuf import Message, read_varint
from tinygpt.weights.containers.tensorflow.crc32c import crc32c

MAGIC = bytes.fromhex("57fb808b247547db")
FOOTER = 48  # bytes, MAGIC included
TRAILER = 5  # bytes behind a block: how it is compressed, and its checksum
MAX_KEY = 1000  # bytes: each key repeats the beginning of the one before, so that long ones would grow without end
MAX_SHARING = 20  # of a table's bytes, by all keys: writers put every 16th as a whole


def read_table(data: memoryview) -> dict[bytes, Message]:
    """All records, in their order. ValueError where the table is damaged or compressed."""
    if len(data) < FOOTER or data[-len(MAGIC) :] != MAGIC:
        raise ValueError("it does not end as such a table does")
    place = len(data) - FOOTER
    for _ in range(2):  # of the block of statistics, which is empty
        _, place = read_varint(data, place, len(data))
    start, place = read_varint(data, place, len(data))
    size, _ = read_varint(data, place, len(data))
    records: dict[bytes, Message] = {}
    end = length = 0
    for _, handle in _records_of(data, start, size):
        start, size = handle.varints()
        if start < end:
            raise ValueError("its blocks are laid over one another")
        end = start + size
        for key, value in _records_of(data, start, size):
            length += len(key)
            if length > MAX_SHARING * len(data):
                raise ValueError(f"it has {len(data)} bytes and keys of more than {MAX_SHARING} times as many")
            if key in records:
                raise ValueError(f"two records {key!r}")
            records[key] = value
    return records


def masked(checksum: int) -> int:
    """A checksum as files hold it: turned, so that those of data with checksums in them are as good as any."""
    return ((checksum >> 15 | checksum << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF


def _records_of(data: memoryview, start: int, size: int) -> Iterator[tuple[bytes, Message]]:
    """Of one block. Each key begins with so many bytes of the one before; where that begins anew stands at the end."""
    stop = start + size
    if size < 4 or stop + TRAILER > len(data):
        raise ValueError("a block reaches outside the file")
    if masked(crc32c(data[start : stop + 1])) != int.from_bytes(data[stop + 1 : stop + TRAILER], "little"):
        raise ValueError("a block does not have its checksum")
    if data[stop]:
        raise ValueError("it is compressed, which is not implemented")
    stop -= 4 + 4 * int.from_bytes(data[stop - 4 : stop], "little")
    key = b""
    while start < stop:
        lengths = []
        for _ in range(3):  # of what is shared with the key before, what is not, and of the value
            length, start = read_varint(data, start, stop)
            lengths.append(length)
        shared, own, length = lengths
        if shared > len(key) or shared + own > MAX_KEY or own + length > stop - start:
            raise ValueError("a record reaches outside its block, or has too long a key")
        key = key[:shared] + bytes(data[start : start + own])
        start += own
        yield key, Message(data, start, start + length)
        start += length
