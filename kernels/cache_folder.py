"""Where compiled kernels are kept: in this user's cache folder, a folder for each build."""

import hashlib
import os
import stat
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HAS_OWNERS = hasattr(os, "geteuid")  # Windows: the folders below are this user's own


@dataclass(frozen=True)
class CacheFolder:
    """Where compiled kernels are kept, None where they cannot be.

    `note` says why it is not the folder that one would expect.
    """

    path: Path | None
    note: str = ""


def fingerprint_of(sources: Path, build: Any) -> str:
    """16 hex digits over all Python files under the folder `sources`, and what else decides the machine code."""
    digest = hashlib.sha256()
    for file in sorted(sources.rglob("*.py")):
        digest.update(f"{file.relative_to(sources).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    digest.update(repr(build).encode())
    return digest.hexdigest()[:16]


def find_folder(name: str) -> CacheFolder:
    """The folder of this name, which this user alone can write to.

    It lies under $NUMBA_CACHE_DIR if that is set, else under the user's cache folder, else, where that does not do,
    under the temporary folder.
    """
    base = _user_cache()
    path, reason = _private_folder(base / name)
    if path is not None:
        return CacheFolder(path)
    note = f"compiled kernels cannot be kept in {base} ({reason})"
    if (path := find_spare(name, is_made=True)) is not None:
        return CacheFolder(path, f"{note}; using {path.parent}. Set NUMBA_CACHE_DIR to choose another folder.")
    return CacheFolder(None, f"{note}; this run keeps them in memory. Set NUMBA_CACHE_DIR to choose another folder.")


def find_spare(name: str, is_made: bool) -> Path | None:
    """The folder of this name under the temporary one, for when the first one is full; made only if asked for."""
    temporary = _temporary_folder()
    if temporary is None or not (is_made or (temporary / name).is_dir()):
        return None
    return _private_folder(temporary / name)[0]


def _user_cache() -> Path:
    """The folder that this user's caches of tinygpt share."""
    if os.environ.get("NUMBA_CACHE_DIR"):
        return Path(os.environ["NUMBA_CACHE_DIR"]).absolute()
    home = Path(os.path.expanduser("~"))  # stays "~" for a user without a home; Path.home() would raise
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "tinygpt" / "cache"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "tinygpt"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "tinygpt"


def _temporary_folder() -> Path | None:
    """This user's folder under the temporary one, or None where a link stands in its place."""
    try:
        folder = Path(tempfile.gettempdir()) / (f"tinygpt-{os.geteuid()}" if HAS_OWNERS else "tinygpt")
    except OSError:  # no folder at all can be written to
        return None
    return None if folder.is_symlink() else folder


def _private_folder(folder: Path) -> tuple[Path | None, str]:
    """Where the folder really lies, made if need be; or None, and why it is not to be used.

    Loading a kernel runs its code. So nobody else may be able to write to the folder, nor to put another one in its
    place: that goes for all folders above it, after links have been followed.
    """
    if not folder.is_absolute():
        return None, "not an absolute path"
    folder = Path(os.path.realpath(folder))
    try:
        for part in (*reversed(folder.parents), folder):
            if reason := _distrust(part, _status_of(part), is_ours=part == folder):
                return None, reason
        with tempfile.TemporaryFile(dir=folder):
            return folder, ""
    except OSError as error:
        return None, f"not writable: {error.strerror or error}"


def _status_of(folder: Path) -> os.stat_result:
    """The folder's owner and mode. One that is not there is made, for this user alone whatever the umask."""
    if not os.path.lexists(folder):
        with suppress(FileExistsError):  # another process made it first
            folder.mkdir(mode=0o700)
            folder.chmod(0o700)
    return folder.lstat()


def _distrust(folder: Path, status: os.stat_result, is_ours: bool) -> str:
    """Why somebody else could decide what lies in the folder; "" if only root could, who can do anything."""
    if not HAS_OWNERS:
        return ""
    user = os.geteuid()
    if status.st_uid != user and (is_ours or status.st_uid != 0):
        return f"{folder} belongs to another user"
    by_others = status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid))
    # In a sticky folder, such as /tmp, nobody can replace what is not theirs.
    if by_others and (is_ours or not status.st_mode & stat.S_ISVTX):
        return f"others may write to {folder}"
    return ""


def _is_own_group(group: int) -> bool:
    """Whether it is the group that many systems give each user: of the user's name, and without other members.

    Where each user has one, the umask lets it write to all that the user makes.
    """
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and found.gr_name == user.pw_name and {*found.gr_mem} <= {user.pw_name}
