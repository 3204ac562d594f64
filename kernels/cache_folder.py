"""Where compiled kernels are kept: in this user's cache folder, a folder for each build."""

import hashlib
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class CacheFolder:
    """Where compiled kernels are kept; `note` says why, where it is not the folder one would expect."""

    path: Path
    note: str = ""


def fingerprint_of(sources: Path, build: Any) -> str:
    """16 hex digits over all Python files under the folder `sources`, and what else decides the machine code."""
    digest = hashlib.sha256()
    for file in sorted(sources.rglob("*.py")):
        digest.update(f"{file.relative_to(sources).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    digest.update(repr(build).encode())
    return digest.hexdigest()[:16]


def find_folder(name: str) -> CacheFolder:
    """The folder of this name.

    It lies under $NUMBA_CACHE_DIR if that is set, else under the user's cache folder, else, where that
    cannot be written to, under the temporary folder.
    """
    base = _user_cache()
    if _is_writable(base / name):
        return CacheFolder(base / name)
    note = f"compiled kernels cannot be kept in {base} (not writable)"
    owned = _owned_temporary_folder()
    if owned is not None and _is_writable(owned / name):
        return CacheFolder(owned / name, f"{note}; using {owned}. Set NUMBA_CACHE_DIR to choose another folder.")
    path = Path(tempfile.mkdtemp(prefix="tinygpt-"))
    return CacheFolder(path, f"{note}; this run compiles into {path}. Set NUMBA_CACHE_DIR to keep them.")


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


def _is_writable(folder: Path) -> bool:
    if not folder.is_absolute():
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _owned_temporary_folder() -> Path | None:
    """This user's folder under the temporary one, or None where someone else made it first.

    Loading a cached kernel runs its code, so a folder that another user may write to is never used.
    """
    if not hasattr(os, "getuid"):  # Windows: the temporary folder is this user's own
        return Path(tempfile.gettempdir()) / "tinygpt"
    folder = Path(tempfile.gettempdir()) / f"tinygpt-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    is_ours = status.st_uid == os.getuid() and not folder.is_symlink() and not status.st_mode & 0o022
    return folder if is_ours else None
