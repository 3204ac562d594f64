"""The checksum of a checkpoint: what tells its weights from others of the same shapes."""

from concurrent.futures import Future
from functools import partial
from pathlib import Path

from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.files import crc32_of, in_a_thread, open_regular
from tinygpt.weights.stored.packed import PackedCheckpoint

CHUNK = 2**20  # bytes


def begin_checksum(checkpoint: Checkpoint | PackedCheckpoint) -> Future[str]:
    """The CRC-32 of all bytes of all files that the weights lie in, beside whatever else is done. Random weights have
    none, and an empty text.

    Files are read, not mapped: what a process never uses shall not count among its memory. CheckpointError, from the
    future, where one cannot be read. A gigabyte takes a quarter of a second, once it has come from the disk.
    """
    if isinstance(checkpoint, PackedCheckpoint):
        return checkpoint.checksum  # of a file that has one in its header, to be compared with
    return in_a_thread(lambda: " ".join(sorted(map(_checksum, checkpoint.files))))


def _checksum(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return crc32_of(iter(partial(file.read, CHUNK), b""))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
