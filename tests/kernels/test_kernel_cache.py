"""The cache of compiled kernels: no damaged file and no file of another user is loaded; a full disk ends no run."""

import errno
import hashlib
import os
import pickle
import stat
import tempfile
from pathlib import Path

import pytest

from tinygpt.kernels.kernel_cache import ANNOUNCEMENT, HEADER, MAGIC, KernelCache, fingerprint, open_cache

NAME = "add-0123.kernel"
CODE = {"machine": b"code" * 5}
needs_owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners of files on Windows")
needs_root = pytest.mark.skipif(
    getattr(os, "geteuid", lambda: 1)() != 0, reason="only root can give a file away"
)


def save(cache: KernelCache, name: str = NAME) -> None:
    cache.save(name, lambda: pickle.dumps(CODE))


def load(cache: KernelCache, name: str = NAME):
    """Load as the next process does."""
    return KernelCache(cache.folder).load(name, dict)


@pytest.fixture
def places(tmp_path, monkeypatch) -> Path:
    """The user's cache folder, which is not there yet; the temporary folder is next to it."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "above" / "base"))
    return tmp_path / "above" / "base"


@pytest.fixture
def cache(tmp_path) -> KernelCache:
    cache = KernelCache(tmp_path / "build")
    save(cache)
    return cache


def test_a_kernel_is_loaded_under_its_name_alone(cache):
    assert load(cache) == CODE
    (cache.folder / NAME).rename(cache.folder / "other.kernel")
    assert load(cache) is None
    assert load(cache, "other.kernel") is None


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


DAMAGES = {
    "emptied": lambda content, path: b"",
    "halved": lambda content, path: content[: len(content) // 2],
    "without its body": lambda content, path: content[:HEADER],
    "longer": lambda content, path: content + b"\0",
    "garbage": lambda content, path: os.urandom(len(content)),
    "of another format": lambda content, path: content.replace(b"kernel 2", b"kernel 1"),
    "of another name": lambda content, path: (
        MAGIC + hashlib.sha256(content[HEADER:]).digest() + content[HEADER:]
    ),
    "a bomb": lambda content, path: content[:HEADER] + pickle.dumps(Bomb(path)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_not_loaded_and_is_written_again(cache, damage, tmp_path):
    path = cache.folder / NAME
    path.write_bytes(DAMAGES[damage](path.read_bytes(), tmp_path / "exploded"))
    assert load(cache) is None
    assert not (tmp_path / "exploded").exists()
    save(cache)
    assert load(cache) == CODE


def test_any_flipped_bit_is_seen(cache):
    path = cache.folder / NAME
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert load(cache) is None


def test_a_kernel_that_does_not_rebuild_is_compiled_again(cache):
    assert KernelCache(cache.folder).load(NAME, lambda code: 1 / 0) is None


@needs_owners
def test_a_file_that_others_may_write_is_not_loaded(cache):
    path = cache.folder / NAME
    path.chmod(0o606)
    assert load(cache) is None
    path.chmod(0o600)
    assert load(cache) == CODE


@needs_owners
@needs_root
def test_a_file_of_another_user_is_not_loaded(cache):
    os.chown(cache.folder / NAME, 12345, 12345)
    assert load(cache) is None


@needs_owners
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_folders_and_files_are_made_for_their_user_alone(places, mask):
    before = os.umask(mask)
    try:
        cache = open_cache("build")
        save(cache)
    finally:
        os.umask(before)
    assert cache.folder == places / "build"
    folders = (places.parent, places, cache.folder)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700] * 3
    assert [(path.name, stat.S_IMODE(path.stat().st_mode)) for path in cache.folder.iterdir()] == [
        (NAME, 0o600)
    ]


@needs_owners
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o1777])
def test_a_folder_that_others_may_write_to_is_not_used(places, mode, caplog):
    (places / "build").mkdir(parents=True)
    (places / "build").chmod(mode)
    cache = open_cache("build")
    assert cache.folder == places.parents[1] / "temporary" / f"tinygpt-{os.geteuid()}" / "build"
    assert caplog.messages == [cache.note]
    for expected in (f"cannot be kept in {places} (", "is writable by other users", str(cache.folder.parent)):
        assert expected in cache.note


@needs_owners
@needs_root
def test_a_folder_of_another_user_is_not_used(places):
    (places / "build").mkdir(parents=True, mode=0o700)
    os.chown(places / "build", 12345, 12345)
    assert open_cache("build").folder != places / "build"


def test_without_any_folder_kernels_stay_in_memory(places, monkeypatch):
    for blocked in (places, places.parents[1] / "temporary"):
        blocked.parent.mkdir(exist_ok=True)
        if blocked.is_dir():
            blocked.rmdir()
        blocked.write_text("a file")
    cache = open_cache("build")
    save(cache)
    assert (cache.folder, cache.names(), load(cache)) == (None, set(), None)
    assert "in memory" in cache.note
    assert not cache.is_keeping


def test_without_a_temporary_folder_kernels_stay_in_memory(places, monkeypatch):
    """As on a container's read-only file system."""
    places.parent.write_text("a file")
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [str(places / "none")])
    cache = open_cache("build")
    assert (cache.folder, cache.is_keeping) == (None, False)
    assert "this run keeps them in memory" in cache.note


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_is_logged_once(cache, monkeypatch, caplog, number):
    def fail(**options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "mkstemp", fail)
    for _ in range(2):
        save(cache, "other.kernel")
    assert len(caplog.messages) == 1
    assert os.strerror(number) in caplog.text
    assert not cache.is_keeping
    assert cache.names() == {NAME}


def test_compiling_is_announced_once(caplog):
    cache = KernelCache(None)
    for name in ("one", "two"):
        cache.announce(name)
    assert (caplog.messages, cache.num_compiled) == ([ANNOUNCEMENT], 2)


def test_a_fingerprint_changes_with_any_source_and_build(tmp_path):
    (tmp_path / "sources" / "deep").mkdir(parents=True)
    sources = tmp_path / "sources"
    for path in (sources / "a.py", sources / "deep" / "b.py"):
        path.write_text("x = 1\n")
    seen = [fingerprint(sources, "build"), fingerprint(sources, "another build")]
    for path in (sources / "a.py", sources / "deep" / "b.py"):
        path.write_text("x = 2\n")
        seen.append(fingerprint(sources, "build"))
    (sources / "a.py").rename(sources / "c.py")
    seen.append(fingerprint(sources, "build"))
    assert len({*seen}) == 5
    sources.rename(tmp_path / "elsewhere")
    assert fingerprint(tmp_path / "elsewhere", "build") == seen[-1]
