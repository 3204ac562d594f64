"""Compiled kernels as files: what is loaded is what this user wrote, to the last bit, or it is not there.

A kernel is kept as a pickle with machine code in it, and whoever loads one runs it. So each file begins with a digest
of its name and content under a key that only this user can read, and nothing is unpickled before the digest is right. A
file that was damaged, cut short or planted is deleted, and its kernel compiled again.
"""

import hmac
import logging
import os
import pickle
import secrets
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tinygpt.kernels.cache_folder import HAS_OWNERS, CacheFolder, find_spare
from tinygpt.kernels.compile_claim import NO_SURPRISE, CompileClaim
from tinygpt.kernels.compiling import ANNOUNCER

MAGIC = b"tinygpt kernel 1\n"  # the format, which the folder's name stands for too
DIGEST_SIZE = KEY_SIZE = 32
HEADER = len(MAGIC) + DIGEST_SIZE
LEFTOVER_AGE = 24 * 3600  # seconds

logger = logging.getLogger(__name__)


class KernelFiles:
    """The compiled kernels in a folder that belongs to this user; None keeps nothing.

    find_spare(is_made): another folder of this user's, for what the first one's disk has no room for; None where there
    is none. is_made says whether to make it.
    """

    def __init__(self, folder: Path | None, find_spare: Callable[[bool], Path | None] = lambda is_made: None):
        self.folder = folder
        self.is_keeping = folder is not None  # until something could not be kept
        self._find_spare = find_spare
        self._spare: KernelFiles | None = None  # once it is there
        self._has_moved = False
        self._claim = CompileClaim()

    @classmethod
    def in_folder(cls, found: CacheFolder) -> "KernelFiles":
        """Those in a folder that `find_folder` has found; the spare one has the same name. The log has its note."""
        if found.note:
            logger.warning("%s", found.note)
        return cls(None) if found.path is None else cls(found.path, partial(find_spare, found.path.name))

    @property
    def folders(self) -> list[Path]:
        """Where kernels lie: in the folder, in the spare one, or in both."""
        places = [self.folder, None if (spare := self._spare_files()) is None else spare.folder]
        return [place for place in places if place is not None and any(place.glob("*.kernel"))]

    def names(self) -> set[str]:
        names = set() if self.folder is None else {path.name for path in self.folder.glob("*.kernel")}
        return names if (spare := self._spare_files()) is None else names | spare.names()

    def load_object(self, name: str, rebuild: Callable[[Any], Any]) -> Any | None:
        """What `rebuild` makes of the object that was saved under this name; None if it is of no use any more."""
        if (body := self.load(name)) is None:
            return None
        try:
            rebuilt = rebuild(pickle.loads(body))
        except Exception as error:  # for whatever reason: it is compiled, and written again
            logger.debug("%s cannot be loaded (%r): it is compiled again", name, error)
            return None
        logger.debug("%s is read", name)
        return rebuilt

    def save_object(self, name: str, pickled: Callable[[], bytes]) -> None:
        """Keep an object that `pickled` takes apart. What is compiled runs, whether or not it can be kept."""
        try:
            body = pickled()
        except Exception as error:
            self.say_not_kept(error)
        else:
            self.save(name, body)

    def load(self, name: str) -> memoryview | None:
        """What was saved under this name; None if nothing was, or if it is not what was saved."""
        body = self._load(name)
        return spare.load(name) if body is None and (spare := self._spare_files()) is not None else body

    def _load(self, name: str) -> memoryview | None:
        if self._key is None:
            return None
        try:
            content, _ = _read(self.folder / name)
        except (OSError, MemoryError):
            return None
        body = memoryview(content)[HEADER:]
        if hmac.compare_digest(content[:HEADER], self._header(name, body)):
            return body
        logger.debug("%s is damaged, or was written by somebody else: its kernel is compiled again", self.folder / name)
        with suppress(OSError):
            (self.folder / name).unlink()
        return None

    def claim(self, name: str) -> None:
        """Before a kernel compiles: if another process is at it, wait until `load` finds it, or for so long that this
        one had better compile it too."""
        if self.is_keeping and self._key is not None:
            self._claim.take((self._spare.folder if self._has_moved else self.folder) / name)

    def end_claim(self) -> None:
        """It is compiled, and saved if it could be."""
        self._claim.end()

    def save(self, name: str, body: bytes) -> None:
        self._save(name, body)
        if self.is_keeping:
            ANNOUNCER.keep()

    def _save(self, name: str, body: bytes) -> None:
        if not self._has_moved and self._key is not None:
            try:
                self._write(name, self._header(name, body) + body)
                self._remove_leftovers()
            except OSError as error:
                if HAS_OWNERS or name not in self.names():  # on Windows another process may be reading the same
                    self._move(error)
        if self._has_moved:
            self._spare._save(name, body)
            self.is_keeping = self._spare.is_keeping

    def mark(self, name: str) -> None:
        """Note that there is all that `name` stands for, unless some of it could not be kept."""
        if self.is_keeping:
            files = self._spare if self._has_moved else self
            with suppress(OSError):  # a mark that cannot be kept costs the next run a needless step
                files._write(f"{name}.warm", "\n".join(sorted(self.names())).encode())

    def marks(self) -> list[str]:
        """What `mark` was told, as long as none of the kernels is gone that were there."""
        there, spare = self.names(), self._spare_files()
        marks = [] if self.folder is None else [*self.folder.glob("*.warm")]
        marks += [] if spare is None else spare.folder.glob("*.warm")
        return sorted({mark.stem for mark in marks if _is_true(mark, there)})

    def say_not_kept(self, error: Exception) -> None:
        """Once: a disk that is full stays full."""
        if self.is_keeping:
            self.is_keeping = False
            logger.warning("compiled kernels cannot be kept in %s (%s); this run goes on", self.folder, _reason(error))

    def _spare_files(self, is_made: bool = False) -> "KernelFiles | None":
        """What has gone to the spare folder, or is to go there."""
        if self._spare is None and (folder := self._find_spare(is_made)) not in (None, self.folder):
            self._spare = KernelFiles(folder)
        return self._spare

    def _move(self, error: OSError) -> None:
        """Keep kernels in the spare folder from now on, and say so."""
        if (spare := self._spare_files(is_made=True)) is None:
            self.say_not_kept(error)
            return
        self._has_moved = True
        folders = self.folder, _reason(error), spare.folder
        logger.warning("compiled kernels cannot be kept in %s (%s): those of this run go to %s", *folders)

    @cached_property
    def _key(self) -> bytes | None:
        """This user's secret for the folder, made by whoever comes first; None where it cannot be kept."""
        if self.folder is None:
            return None
        try:
            return _read_key(self.folder / "key") or self._make_key()
        except OSError as error:
            self._move(error)
            return None

    def _make_key(self) -> bytes:
        path = self.folder / "key"
        part = self._write_part(secrets.token_bytes(KEY_SIZE))
        try:
            with suppress(OSError):  # another process was first, or the file system has no links
                os.link(part, path)
            if _read_key(path) is None:
                os.replace(part, path)  # an unfit one: all that was kept with it is compiled again
            if (key := _read_key(path)) is None:
                raise PermissionError(0, "it cannot hide a key from others")
            return key
        finally:
            with suppress(OSError):
                os.unlink(part)

    def _header(self, name: str, body: bytes | memoryview) -> bytes:
        digest = hmac.new(self._key, f"{name}\0".encode(), "sha256")
        digest.update(body)
        return MAGIC + digest.digest()

    def _write(self, name: str, content: bytes) -> None:
        """All of it or nothing, whoever reads or writes the same file meanwhile."""
        part = self._write_part(content)
        try:
            os.replace(part, self.folder / name)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise

    def _write_part(self, content: bytes) -> str:
        """Write to a file that only this user may read; its name."""
        self.folder.mkdir(mode=0o700, exist_ok=True)  # somebody may have tidied up meanwhile
        descriptor, part = tempfile.mkstemp(suffix=".part", dir=self.folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
            return part
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise

    def _remove_leftovers(self) -> None:
        """Remove what processes that were killed had begun to write."""
        for part in self.folder.glob("*.part"):
            with suppress(OSError):
                if part.stat().st_mtime < time.time() - LEFTOVER_AGE:
                    part.unlink()


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _read(path: Path) -> tuple[bytes, os.stat_result]:
    """A file's content, its owner and mode."""
    with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | NO_SURPRISE)) as file:
        return file.read() or b"", os.fstat(file.fileno())


def _read_key(path: Path) -> bytes | None:
    """The key, if there is one that nobody else can have written or read."""
    try:
        key, status = _read(path)
    except OSError:
        return None
    is_secret = not HAS_OWNERS or (status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO))
    return key if is_secret and len(key) == KEY_SIZE else None


def _is_true(mark: Path, there: set[str]) -> bool:
    try:
        needed = set(mark.read_text().split())
    except (OSError, ValueError):
        return False
    return bool(needed) and needed <= there
