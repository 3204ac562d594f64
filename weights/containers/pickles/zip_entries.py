"""The entries of an uncompressed zip archive that lies in a mapped file.

`zipfile` of the standard library reads the directory. Where each entry's data lie, and whether they are what was
written, is found here, because nothing is copied out of the archive.
"""

import struct
import zipfile
import zlib
from dataclasses import dataclass

from tinygpt.weights.containers.mapped_file import MappedFile
from tinygpt.weights.errors import CheckpointError

LOCAL_HEADER = struct.Struct("<4s22xHH")  # of an entry: signature, lengths of its name and its extra field


@dataclass(frozen=True)
class ZipEntry:
    """An entry's bytes in the file, and the CRC-32 that they should have, or None where the archive has none."""

    file: MappedFile
    name: str
    data: range
    crc32: int | None

    def read(self) -> bytes:
        """A copy of the data. Raises CheckpointError if they are damaged."""
        self.verify()
        return self.file.data[self.data.start : self.data.stop]

    def verify(self) -> None:
        """Raises CheckpointError unless the data have their checksum."""
        if self.crc32 is not None and zlib.crc32(self._view()) != self.crc32:
            raise CheckpointError(
                f"{self.file.path} is damaged, its entry {self.name!r} does not have the checksum in the archive's "
                "directory: download it again."
            )

    def _view(self) -> memoryview:
        return memoryview(self.file.data)[self.data.start : self.data.stop]


def read_entries(file: MappedFile) -> dict[str, ZipEntry]:
    """The archive's entries, by their names without the folder that all of them lie in.

    Raises CheckpointError for a damaged archive, and for one whose entries are not each stored as they are in bytes of
    their own.
    """
    try:
        with zipfile.ZipFile(file.data) as archive:
            listed = archive.infolist()
        _refuse_unlike_torch(file, listed)
        ranges = [_data_range(file, info) for info in listed]
    except CheckpointError:
        raise
    except (zipfile.BadZipFile, NotImplementedError, UnicodeError, EOFError, OSError, ValueError) as error:
        message = f"{file.path} is a damaged zip archive ({error}): download it again."
        raise CheckpointError(message) from error
    has_checksums = any(info.CRC for info in listed)  # torch.serialization.set_crc32_options(False) writes 0 for all
    entries = {
        _inner_name(info): ZipEntry(file, info.filename, data, info.CRC if has_checksums else None)
        for info, data in zip(listed, ranges, strict=True)
    }
    _refuse_overlaps(file, entries)
    return entries


def _inner_name(info: zipfile.ZipInfo) -> str:
    return info.filename.partition("/")[2]


def _refuse_unlike_torch(file: MappedFile, listed: list[zipfile.ZipInfo]) -> None:
    names = set()
    for info in listed:
        stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
        if not stored or info.flag_bits & 1 or _inner_name(info) in names:
            _refuse(file, info.filename, "compressed, encrypted or repeated")
        names.add(_inner_name(info))


def _data_range(file: MappedFile, info: zipfile.ZipInfo) -> range:
    """Where an entry's data lie. The lengths before them are only in the entry's own header."""
    start = info.header_offset + LOCAL_HEADER.size
    if not LOCAL_HEADER.size <= start <= len(file):
        raise zipfile.BadZipFile(f"the entry {info.filename!r} begins outside the file")
    signature, name_size, extra_size = LOCAL_HEADER.unpack_from(file.data, info.header_offset)
    start += name_size + extra_size
    if signature != b"PK\x03\x04" or start + info.file_size > len(file):
        raise zipfile.BadZipFile(f"the entry {info.filename!r} reaches beyond the file")
    return range(start, start + info.file_size)


def _refuse_overlaps(file: MappedFile, entries: dict[str, ZipEntry]) -> None:
    """Many entries over the same bytes would be checked again and again."""
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.data.start, entry.data.stop)):
        if entry.data.start < end:
            _refuse(file, entry.name, "laid over another")
        end = entry.data.stop


def _refuse(file: MappedFile, name: str, what: str) -> None:
    raise CheckpointError(
        f"{file.path} is a zip archive whose entry {name!r} is {what}, as torch.save never does: save it again with "
        "torch.save or as safetensors."
    )
