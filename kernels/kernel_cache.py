"""Compiled kernels on disk: a private folder for each build, a file with a SHA-256 for each kernel.

Loading a kernel runs it: folder and files must belong to this user and be closed to other writers.
"""

import hashlib
import logging
import os
import pickle
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

MAGIC = b"tinygpt kernel 2\n"  # the format of a file, which is part of a build's fingerprint
HEADER = len(MAGIC) + hashlib.sha256().digest_size
ANNOUNCEMENT = "compiling kernels for this machine (10 to 30 s, once for each dtype and kind of request)"

logger = logging.getLogger(__name__)


class KernelCache:
    """The compiled kernels of one build.

    folder: None if no folder is usable
    note: the reason for another folder than the user's
    is_keeping: whether every compiled kernel is on disk
    """

    def __init__(self, folder: Path | None, note: str = ""):
        self.folder, self.note = folder, note
        self.is_keeping = folder is not None
        self.num_compiled = 0
        self.seconds = 0.0  # of compiling
        self._announced = 0.0

    def names(self) -> set[str]:
        return set() if self.folder is None else {path.name for path in self.folder.glob("*.kernel")}

    def load(self, name: str, rebuild: Callable[[Any], Any]) -> Any | None:
        if (body := self._read(name)) is None:
            return None
        try:
            return rebuild(pickle.loads(body))
        except Exception as error:  # for any reason: the kernel is compiled again
            logger.debug("%s does not load and is compiled again: %r", name, error)
            return None

    def announce(self, name: str) -> None:
        if not self.num_compiled:
            logger.warning(ANNOUNCEMENT)
        logger.debug("compiling %s", name)
        self.num_compiled += 1
        self._announced = time.perf_counter()

    def save(self, name: str, pickled: Callable[[], bytes]) -> None:
        """Keep a compiled kernel. A full disk is logged once."""
        now = time.perf_counter()
        self.seconds += now - self._announced
        self._announced = now  # of the kernel around this one
        if self.folder is None:
            return
        try:
            body = pickled()
            self._write(name, _header(name, body) + body)
        except Exception as error:  # of Numba's serializer as well
            if self.is_keeping:
                logger.warning("compiled kernels cannot be kept in %s: %s", self.folder, error)
            self.is_keeping = False

    def _read(self, name: str) -> bytes | None:
        """Return a file's content, or None if another user may have written it."""
        if self.folder is None:
            return None
        try:
            with open(self.folder / name, "rb") as file:
                is_ours = not _distrust(os.fstat(file.fileno()))
                content = file.read() if is_ours else b""
        except OSError:
            return None
        body = content[HEADER:]
        if content[:HEADER] == _header(name, body):
            return body
        logger.debug("%s is damaged, or another user may write to it: the kernel is compiled again", name)
        return None

    def _write(self, name: str, content: bytes) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(suffix=".part", dir=self.folder)  # mode 0600
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
            os.replace(part, self.folder / name)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise


class FunctionCache:
    """What Numba asks of the cache of one function, on any target."""

    def __init__(self, function: Callable):
        self._function = function

    def flush(self) -> None:
        """Do nothing: an existing file is valid."""

    def file_name(self, known: str) -> str:
        """Return the file's name for all that a kernel depends on."""
        digest = hashlib.sha256(known.encode()).hexdigest()[:32]
        return f"{self._function.__name__.strip('<>')}-{digest}.kernel"


def open_cache(name: str) -> KernelCache:
    """Return the cache of this name in the user's cache folder, else in the temporary folder."""
    base = user_cache()
    if not (reason := _make_private(base / name)):
        return KernelCache(base / name)
    user = f"-{os.geteuid()}" if hasattr(os, "geteuid") else ""
    try:
        spare = Path(tempfile.gettempdir(), f"tinygpt{user}", name)
    except FileNotFoundError:  # no temporary folder is writable
        spare = None
    is_usable = spare is not None and not _make_private(spare)
    use = f"using {spare.parent}" if is_usable else "this run keeps them in memory"
    note = f"compiled kernels cannot be kept in {base} ({reason}); {use}. Set TINYGPT_CACHE_DIR to another folder."
    logger.warning("%s", note)
    return KernelCache(spare if is_usable else None, note)


def fingerprint(sources: Path, build: Any, others: Iterable[Path] = ()) -> str:
    """Return 16 hex digits of a folder's Python files, of `others` and of `build`."""
    digest = hashlib.sha256(MAGIC)
    for file in sorted([*sources.rglob("*.py"), *others]):
        name = file.relative_to(sources.parent).as_posix().removeprefix(f"{sources.name}/")
        digest.update(f"{name}\0".encode() + file.read_bytes() + b"\0")
    digest.update(repr(build).encode())
    return digest.hexdigest()[:16]


def user_cache() -> Path:
    if folder := os.environ.get("TINYGPT_CACHE_DIR") or os.environ.get("NUMBA_CACHE_DIR"):
        return Path(folder).absolute()
    home = Path(os.path.expanduser("~"))  # "~" for a user without a home; Path.home() raises
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "tinygpt" / "cache"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "tinygpt"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "tinygpt"


def _make_private(folder: Path) -> str:
    """Make a folder for this user alone. Return the reason of a failure, or ""."""
    if not folder.is_absolute():
        return "not an absolute path"
    try:
        for part in (*reversed(folder.parents), folder):
            if not part.exists():
                with suppress(FileExistsError):  # another process made it
                    part.mkdir(mode=0o700)
                    part.chmod(0o700)  # in spite of the umask
        reason = _distrust(folder.lstat())
        with tempfile.TemporaryFile(dir=folder):
            return f"{folder} {reason}" if reason else ""
    except OSError as error:
        return f"not writable: {error.strerror or error}"


def _distrust(status: os.stat_result) -> str:
    """Return why another user may have written a file or folder, or ""."""
    if not hasattr(os, "geteuid"):  # Windows: the user's cache folder is private
        return ""
    if status.st_uid != os.geteuid():
        return "belongs to another user"
    return "is writable by other users" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def _header(name: str, body: bytes) -> bytes:
    return MAGIC + hashlib.sha256(f"{name}\0".encode() + body).digest()
